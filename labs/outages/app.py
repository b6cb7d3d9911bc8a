"""The app of the workers; it records their executions and errors in the ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_received

from celery_idempotent import IdempotentTask, signals
from labs.rig.worker import ledger_of, settings_of_worker

NAME = "labs.outages.app"
CHARGE = "outages.charge"
#: Seconds that a charge takes.
WORK = 0.005


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Returns the app of a worker."""
    ledger = ledger_of(settings)
    app = Celery("outages", set_as_current=False)
    app.conf.update(settings)

    @app.task(base=IdempotentTask, bind=True, name=CHARGE, shared=False)
    def charge(self: Any, order: str) -> str:
        """Records the execution in the ledger and returns a unique receipt."""
        ledger.write("executed", order=order)
        time.sleep(WORK)
        return uuid4().hex

    @task_received.connect(weak=False)
    def received(request: Any, **_: Any) -> None:
        ledger.write("received", task_id=request.id)

    @signals.store_unavailable.connect(weak=False)
    def store_unavailable(task_id: str, **_: Any) -> None:
        ledger.write("postponed", task_id=task_id)

    @signals.outcome_unsaved.connect(weak=False)
    def unsaved(task_id: str, **_: Any) -> None:
        ledger.write("unsaved", task_id=task_id)

    return app


if worker_settings := settings_of_worker():
    app = make_app(worker_settings)
