"""What the broker does with messages that are not acknowledged: how soon, and how often."""

from __future__ import annotations

from typing import Any

from celery import Celery

#: Transports with a visibility timeout, and theirs where nothing else is said (seconds).
VISIBILITY_TIMEOUT = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
#: Of a queue that kombu has not made, where nothing else is said: Amazon's own.
SQS_VISIBILITY_TIMEOUT = 30.0


def transport(app: Celery) -> str:
    """The scheme of the broker's URL: ``redis``, ``amqp``, ``sqs`` …"""
    url = str(app.conf.broker_read_url or "")
    return url.split("://", 1)[0].split("+", 1)[0].lower()


def options_of(app: Celery) -> dict[str, Any]:
    """The app's ``broker_transport_options``."""
    return app.conf.broker_transport_options or {}


def visibility_timeout(app: Celery) -> float | None:
    """Seconds after which an unacknowledged message is delivered again; None where it never is."""
    default = VISIBILITY_TIMEOUT.get(transport(app))
    if default is None:
        return None
    options = options_of(app)
    if has_predefined_queues(app):
        default = SQS_VISIBILITY_TIMEOUT
    return float(options.get("visibility_timeout") or default)


def has_predefined_queues(app: Celery) -> bool:
    """Whether the queues are Amazon's own, which kombu does not configure."""
    return transport(app) == "sqs" and bool(options_of(app).get("predefined_queues"))


def quorum_queues(app: Celery) -> list[Any]:
    """The app's queues that it declares as quorum queues."""
    return [
        q
        for q in app.amqp.queues.values()
        if (q.queue_arguments or {}).get("x-queue-type") == "quorum"
    ]
