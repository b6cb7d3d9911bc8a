"""The Celery app of one contestant in one scenario: ``celery -A labs.comparison.app``.

All contestants have the same tasks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_postrun, task_success

from labs.comparison.contestants import OURS, find_contestant
from labs.rig.worker import settings_of_worker
from tests.worker.ledger import Ledger

NAME = "labs.comparison.app"


def make_app(settings: Mapping[str, Any], *, in_worker: bool = False) -> Celery:
    """Returns the app with its tasks.

    Args:
        settings: also the name of the contestant, the URL of its locks, and their seconds; the URL
            of the ledger, and options of every task.
    """
    contestant = find_contestant(settings["lab_contestant"])
    locks, lock = settings["lab_locks"], settings["lab_lock"]
    ledger = Ledger(settings["lab_ledger"])
    app = Celery("peers", set_as_current=False)
    app.conf.update(contestant.settings(locks))
    app.conf.update(settings)
    # Every contestant gets the crash safety that Celery itself has.
    options = {
        "shared": False,
        "acks_late": True,
        "reject_on_worker_lost": True,
        **contestant.task_options(lock),
        **settings["lab_options"],
    }

    def task(**own: Any) -> Any:
        if in_worker:
            return contestant.worker_task(app, locks, lock, **own, **options)
        return app.task(**own, **options)

    @task(bind=True, name="peers.work")
    def work(self: Any, order: str, seconds: float = 0.0) -> str:
        """Takes `seconds`; returns a receipt that differs for each execution."""
        with ledger.run(order, self.request.id):
            time.sleep(seconds)
            return uuid4().hex

    @task(bind=True, name="peers.retry_once")
    def retry_once(self: Any, order: str) -> str:
        """Retries once, then returns a receipt."""
        with ledger.run(order, self.request.id):
            if self.request.retries == 0:
                raise self.retry(countdown=0)
            return uuid4().hex

    @task(bind=True, name="peers.follow")
    def follow(self: Any, before: Any, order: str) -> Any:
        """Follows another task in a chain, or the header of a chord."""
        with ledger.run(order, self.request.id):
            return before

    @task(name="peers.no_op")
    def no_op(order: str) -> None:
        """Does nothing."""

    return app


def _disconnect_signals() -> None:
    """Removes the overhead of celery-idempotent, which Celery loads as a command-line plugin."""
    from celery_idempotent.core.task.message import continuation

    task_success.disconnect(continuation.mark_continuation_sent)
    task_postrun.disconnect(continuation.free_frames)


app = None
if worker_settings := settings_of_worker():
    app = make_app(worker_settings, in_worker=True)
    contestant = find_contestant(worker_settings["lab_contestant"])
    # The environments of other libraries do not have it.
    if contestant.python == sys.executable and contestant is not OURS:
        _disconnect_signals()
