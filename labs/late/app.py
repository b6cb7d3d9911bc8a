"""The app of the workers, which record their executions in the ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from labs.rig import late
from labs.rig.worker import ledger_of, plans_of, settings_of_worker

NAME = "labs.late.app"


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Returns the app with its task, whose options are in `settings`."""
    late.intercept(plans_of(settings))
    ledger = ledger_of(settings)
    app = Celery("late", set_as_current=False)
    app.conf.update(settings)

    @app.task(
        name="job",
        shared=False,
        bind=True,
        base=IdempotentTask,
        idempotency_key="{key}",
        **settings["lab_options"],
    )
    def job(self: Any, key: str, seconds: float, until: str = "") -> str:
        """Takes `seconds`; with a file `until`, waits for that file, and fails the first time."""
        execution = self.idempotency
        attempt = execution.attempt if execution else 0  # without the store
        ledger.write("started", key=key, task_id=self.request.id, attempt=attempt)
        time.sleep(seconds)
        if until:
            while not Path(until).exists():
                time.sleep(0.02)
            failed = Path(f"{until}.failed")
            if not failed.exists():
                failed.touch()
                raise ValueError("the first execution fails")
        ledger.write("ended", key=key, task_id=self.request.id)
        return str(self.request.id)

    return app


if settings := settings_of_worker():
    app = make_app(settings)
