"""The app of the workers; each delivery, and the start of each execution, is recorded in Redis."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import task_received, worker_init
from redis import Redis

from celery_idempotent import IdempotentTask
from tests.servers.program import die_with_parent

NAME = "labs.redelivery.app"
SETTINGS_VARIABLE = "REDELIVERY_SETTINGS"

app = Celery("redelivery")
app.conf.update(json.loads(os.environ.get(SETTINGS_VARIABLE, "{}")))
worker_init.connect(die_with_parent)
_clients: dict[int, Redis] = {}


def _client() -> Redis:
    # A child must not use the connection of its parent.
    return _clients.setdefault(os.getpid(), Redis.from_url(app.conf.lab_url))


@task_received.connect
def _received(request: Any, **_: object) -> None:
    _client().rpush(f"deliveries:{request.id}", request.hostname)


@app.task(bind=True, base=IdempotentTask, name="redelivery.work", ignore_result=True)
def work(self: Any, number: str, seconds: float) -> None:
    """Records its start and works for `seconds`."""
    client = _client()
    client.rpush(f"starts:{self.request.id}", f"{time.time()} {self.request.hostname}")
    time.sleep(seconds)
    client.set(f"ended:{self.request.id}", 1)
