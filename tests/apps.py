"""Closes the Celery apps of tests."""

from __future__ import annotations

from celery import Celery
from celery.backends.redis import RedisBackend


def close(app: Celery) -> None:
    """Closes an app, whose results may then be collected without their server.

    A result that is collected is unsubscribed from: on a stopped server that takes twenty seconds,
    and raises in another test. Celery's backend keeps a result whose `get` has timed out.
    """
    if isinstance(app.backend, RedisBackend):
        app.backend.result_consumer.subscribed_to.clear()
        app.backend.result_consumer._pubsub = None
    app.close()
