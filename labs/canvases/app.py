"""The app of the workers and of the publisher."""

from __future__ import annotations

import json
import os
import time
from functools import cache
from typing import Any

from celery import Celery, Task, chain
from celery.signals import worker_init
from redis import Redis

from celery_idempotent import IdempotentTask
from tests.worker.parent_death import die_with_parent

SETTINGS_VARIABLE = "CANVASES_SETTINGS"
LEASE = 4.0


class DeclinedError(Exception):
    """The order is declined."""


@cache
def ledger(url: str) -> Redis:
    return Redis.from_url(url, decode_responses=True)


def make_app(settings: dict[str, Any]) -> Celery:
    """Returns the app; ``plain`` in `settings` makes its tasks those of Celery."""
    app = Celery("canvases", set_as_current=False)
    app.conf.update({
        "broker_connection_retry_on_startup": True,
        "worker_prefetch_multiplier": 2,
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "idempotency_lease": LEASE,
        "idempotency_replay_errors": (DeclinedError,),
        **settings,
    })  # fmt: skip
    base = Task if settings["plain"] else IdempotentTask

    def note(name: str) -> None:
        ledger(app.conf.ledger).rpush("ends", name)

    def work(name: str, seconds: float) -> str:
        time.sleep(seconds)
        note(name)
        return name

    def tail(before: Any, name: str) -> Any:
        note(name)
        return [before, name]

    def decline(name: str) -> None:
        note(name)
        raise DeclinedError(name)

    def apologise(name: str) -> None:
        note(name)

    def again(self: Any, name: str) -> str:
        if self.request.retries < 2:
            raise self.retry(countdown=0.3)
        note(name)
        return name

    def hand_over(self: Any, name: str, seconds: float) -> None:
        work, tail = app.tasks["canvases.work"], app.tasks["canvases.tail"]
        replacement = chain(work.si(f"{name} inside", seconds), tail.s(f"{name} inside, tail"))
        raise self.replace(replacement)

    for function in (work, tail, decline, apologise):
        app.task(function, base=base, name=f"canvases.{function.__name__}", shared=False)
    for method in (again, hand_over):
        name = f"canvases.{method.__name__}"
        app.task(method, base=base, name=name, shared=False, bind=True)
    return app


app = (
    make_app(json.loads(os.environ[SETTINGS_VARIABLE])) if SETTINGS_VARIABLE in os.environ else None
)
worker_init.connect(die_with_parent)
