"""The app of the workers; each delivery, and the start of each execution, is recorded in Redis."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from celery import Celery
from celery.signals import task_received
from redis import Redis

from celery_idempotent import IdempotentTask
from labs.rig.worker import settings_of_worker

NAME = "labs.redelivery.app"


@cache
def _client_of(url: str, pid: int) -> Redis:
    # A child must not use the connection of its parent.
    return Redis.from_url(url)


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Returns the app with its task."""
    app = Celery("redelivery", set_as_current=False)
    app.conf.update(settings)

    @task_received.connect(weak=False)
    def received(request: Any, **_: object) -> None:
        _client_of(app.conf.lab_url, os.getpid()).rpush(
            f"deliveries:{request.id}", request.hostname
        )

    @app.task(
        bind=True, base=IdempotentTask, name="redelivery.work", shared=False, ignore_result=True
    )
    def work(self: Any, number: str, seconds: float) -> None:
        """Records its start and works for `seconds`."""
        client = _client_of(app.conf.lab_url, os.getpid())
        client.rpush(f"starts:{self.request.id}", f"{time.time()} {self.request.hostname}")
        time.sleep(seconds)
        client.set(f"ended:{self.request.id}", 1)

    return app


if worker_settings := settings_of_worker():
    app = make_app(worker_settings)
