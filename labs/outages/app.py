"""The app of the workers; it records their executions and errors in the ledger."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_received, worker_init

from celery_idempotent import IdempotentTask, signals
from labs.rig.ledger import Ledger
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


def _define(app: Celery) -> None:
    ledger = Ledger(Path(app.conf.outage_ledger))

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


if SETTINGS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]))
    _define(app)
    worker_init.connect(die_with_parent)
