"""The app whose workers live through an outage. They load this module; it measures what they do."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_received, worker_init
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent import IdempotentTask, StoreUnavailableError, signals
from celery_idempotent.store import record_store as records
from tests.labs.outages.ledger import Ledger
from tests.worker.mortal import die_with_parent

NAME = "tests.labs.outages.app"
SETTINGS_VARIABLE = "OUTAGE_SETTINGS"

CHARGE = "outages.charge"
#: Seconds that a charge takes.
WORK = 0.005


def make_app(settings: Mapping[str, Any]) -> Celery:
    """The app, as workers and publishers have it."""
    made = Celery("outages", set_as_current=False)
    made.conf.update(settings)
    return made


_entered = threading.local()


class TimedTask(IdempotentTask):
    """Knows when it was called."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _entered.at = time.perf_counter()
        return super().__call__(*args, **kwargs)


def charge(self: Any, order: str) -> str:
    """Charge an order: the ledger has every time that this happens, and no two receipts are one."""
    execution = self.idempotency
    ledger.write(
        "ran",
        order=order,
        task_id=self.request.id,
        attempt=execution.attempt,
        protected=execution.protected,
    )
    time.sleep(WORK)
    return uuid4().hex


def _refused(task_id: str, error: StoreUnavailableError, **_: Any) -> None:
    taken = time.perf_counter() - _entered.at
    ledger.write(
        "refused",
        task_id=task_id,
        microseconds=round(taken * 1e6),
        by_breaker="is asked again in" in str(error),
    )


def _received(request: Any, **_: Any) -> None:
    ledger.write("received", task_id=request.id)


def _unsaved(task_id: str, **_: Any) -> None:
    ledger.write("unsaved", task_id=task_id)


def _explained(error: Exception, key: str) -> Exception:
    if isinstance(error, RedisTimeoutError):
        ledger.write("timeout")
    return _explain(error, key)


if SETTINGS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]))
    ledger = Ledger(Path(app.conf.outage_ledger))
    app.task(charge, base=TimedTask, bind=True, name=CHARGE, shared=False)
    task_received.connect(_received)
    signals.store_unavailable.connect(_refused)
    signals.outcome_unsaved.connect(_unsaved)
    # Every fault of the store passes here.
    _explain = records.translate_error
    records.translate_error = _explained  # type: ignore[assignment]
    worker_init.connect(die_with_parent)
