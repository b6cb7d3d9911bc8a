"""The app of the workers, which record their executions in the ledger."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init

from celery_idempotent import IdempotentTask
from labs.rig import late
from labs.rig.ledger import Ledger
from tests.servers.program import die_with_parent

NAME = "labs.late.app"
SETTINGS_VARIABLE = "LATE_SETTINGS"


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Returns the app with its task; `settings` has the options of the task and the folder."""
    settings = dict(settings)
    folder, options = Path(settings.pop("late_folder")), settings.pop("late_options")
    late.intercept(folder / "plans")
    ledger = Ledger(folder / "ledger")
    app = Celery("late", set_as_current=False)
    app.conf.update(settings)

    @app.task(
        name="job", shared=False, bind=True, base=IdempotentTask, idempotency_key="{key}", **options
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


if SETTINGS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]))
    worker_init.connect(die_with_parent)
