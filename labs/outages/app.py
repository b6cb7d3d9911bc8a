"""The app of the workers; it records their executions and errors in the ledger."""

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
from celery_idempotent.core.store import record_store as records
from labs.outages.ledger import Ledger
from tests.servers.program import die_with_parent

NAME = "labs.outages.app"
SETTINGS_VARIABLE = "OUTAGE_SETTINGS"

CHARGE = "outages.charge"
#: Seconds that a charge takes.
WORK = 0.005


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Returns the app, for workers and publishers."""
    app = Celery("outages", set_as_current=False)
    app.conf.update(settings)
    return app


_called = threading.local()


class TimedTask(IdempotentTask):
    """Notes the time of each call."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _called.at = time.perf_counter()
        return super().__call__(*args, **kwargs)


def charge(self: Any, order: str) -> str:
    """Records the execution in the ledger and returns a unique receipt."""
    execution = self.idempotency
    ledger.write(
        "executed",
        order=order,
        task_id=self.request.id,
        attempt=execution.attempt,
        protected=execution.protected,
    )
    time.sleep(WORK)
    return uuid4().hex


def _store_unavailable(task_id: str, error: StoreUnavailableError, **_: Any) -> None:
    duration = time.perf_counter() - _called.at
    ledger.write(
        "rejected",
        task_id=task_id,
        microseconds=round(duration * 1e6),
        by_breaker=error.__cause__ is None,  # any other error has a connection error as its cause
    )


def _received(request: Any, **_: Any) -> None:
    ledger.write("received", task_id=request.id)


def _unsaved(task_id: str, **_: Any) -> None:
    ledger.write("unsaved", task_id=task_id)


def _translate_error(error: Exception, key: str) -> Exception:
    if isinstance(error, RedisTimeoutError):
        ledger.write("timeout")
    return _original_translate_error(error, key)


if SETTINGS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]))
    ledger = Ledger(Path(app.conf.outage_ledger))
    app.task(charge, base=TimedTask, bind=True, name=CHARGE, shared=False)
    task_received.connect(_received)
    signals.store_unavailable.connect(_store_unavailable)
    signals.outcome_unsaved.connect(_unsaved)
    # The store calls this for every error of a connection.
    _original_translate_error = records.translate_error
    records.translate_error = _translate_error  # type: ignore[assignment]
    worker_init.connect(die_with_parent)
