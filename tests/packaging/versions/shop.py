"""The app of workers that run different versions of the library.

It uses the public interface only, because the version before must run it, too. The tests do not
import it: they publish by name.
"""

from __future__ import annotations

import json
import os
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import worker_init

import celery_idempotent
from celery_idempotent import IdempotentTask, signals
from tests.servers.program import die_with_parent
from tests.worker.ledger import Ledger

#: Names the version of a worker.
VERSION = os.environ["SHOP_VERSION"]

if not celery_idempotent.__file__.startswith(os.environ["SHOP_LIBRARY"]):
    raise ImportError(f"this is not the version under test: {celery_idempotent.__file__}")

app = Celery("shop")
app.conf.update(json.loads(os.environ["SHOP_SETTINGS"]))
ledger = Ledger.of(app)
worker_init.connect(die_with_parent)


class Task(IdempotentTask):
    """The task of most tests."""

    idempotency_key = "order:{order}"
    idempotency_lease = 10
    idempotency_label = "order {order}"
    idempotency_replay_errors = (ValueError,)


def handle(self: Any, order: str, outcome: str = "charged") -> dict[str, str]:
    """Handles an order, in two parts."""
    part = self.idempotency.step("book", lambda: f"{VERSION} {uuid4().hex}")
    ledger.note(order, VERSION)
    with ledger.run(order, self.request.id, self.idempotency):
        if outcome == "declined":
            raise ValueError(f"{order} is declined")
        if outcome == "retried" and not self.request.retries:
            raise self.retry(countdown=0)
        return {"part": part, "receipt": uuid4().hex}


for name, options in {
    "charge": {},
    "brief": {"idempotency_lease": 2},
    "finished": {"idempotency_until": "finished"},
    "reserved": {"idempotency_dedupe_publish": True},
    "collapsed": {"idempotency_until": "started", "idempotency_dedupe_publish": True},
}.items():
    app.task(bind=True, base=Task, name=f"shop.{name}", **options)(handle)


@app.task(name="shop.publish")
def publish(task: str, order: str, queue: str) -> str:
    """Publishes a call with the library of this worker, and returns its task id."""
    return app.tasks[task].apply_async((order,), queue=queue).id


@signals.conflicted.connect
@signals.taken_over.connect
@signals.completed.connect
@signals.replayed.connect
def record(signal: Any, sender: Any, **details: Any) -> None:
    """Records the signal for the tests."""
    ledger.record_signal(signal.name.removeprefix("idempotency_"), sender.name, details)
