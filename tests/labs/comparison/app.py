"""The Celery app of one contestant in one scenario; ``celery -A tests.labs.comparison.app``.

The tasks are the same for all contestants, word for word.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_failure, task_success, worker_init, worker_process_init

from tests.labs.comparison.contestants import OURS, contestant_named
from tests.labs.comparison.ledger import Ledger

PLAN_VARIABLE = "PEERS_PLAN"

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


@dataclass(frozen=True)
class Plan:
    """All that an app is made of; goes to the worker as JSON."""

    contestant: str
    #: URLs of Redis databases.
    broker: str
    backend: str
    locks: str
    ledger: str
    #: Seconds.
    lock: float = 60.0
    settings: dict[str, Any] = field(default_factory=dict)
    task_options: dict[str, Any] = field(default_factory=dict)

    def write(self) -> str:
        """For the environment of a worker."""
        return json.dumps(asdict(self))


def make_app(plan: Plan) -> Celery:
    """The app, with its tasks."""
    contestant = contestant_named(plan.contestant)
    app = Celery("peers", broker=plan.broker, backend=plan.backend, set_as_current=False)
    app.conf.update(contestant.settings(plan.locks))
    app.conf.update(broker_connection_retry_on_startup=True, **plan.settings)
    # Every contestant gets the crash safety that Celery itself has.
    options = {
        "shared": False,
        "acks_late": True,
        "reject_on_worker_lost": True,
        **contestant.task_options(plan.lock),
        **plan.task_options,
    }

    @app.task(bind=True, name="peers.work", **options)
    def work(self: Any, order: str, seconds: float = 0.0) -> str:
        """Take so long; the receipt tells one run from another."""
        with _ledger(plan.ledger).run(order, self.request.id):
            time.sleep(seconds)
            return uuid4().hex

    @app.task(bind=True, name="peers.retry_once", **options)
    def retry_once(self: Any, order: str) -> str:
        """Ask for one retry, as Celery's own tasks do."""
        with _ledger(plan.ledger).run(order, self.request.id):
            if self.request.retries == 0:
                raise self.retry(countdown=0)
            return uuid4().hex

    @app.task(bind=True, name="peers.follow", **options)
    def follow(self: Any, before: Any, order: str) -> Any:
        """What comes after a task in a chain, or after a chord's header."""
        with _ledger(plan.ledger).run(order, self.request.id):
            return before

    @app.task(name="peers.no_op", **options)
    def no_op(order: str) -> None:
        """Nothing at all."""

    return app


_ledger = cache(Ledger)


@worker_init.connect
@worker_process_init.connect
def _die_with_parent(**_: object) -> None:
    """Let Linux end a worker with the command, and the pool with the worker, come what may."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _without_ours() -> None:
    """For the others, which load celery-idempotent as a plugin of the command line: pay nothing."""
    from celery_idempotent.task.canvas import note

    task_success.disconnect(note)
    task_failure.disconnect(note)


app = (
    make_app(Plan(**json.loads(os.environ[PLAN_VARIABLE]))) if PLAN_VARIABLE in os.environ else None
)
if app is not None and json.loads(os.environ[PLAN_VARIABLE])["contestant"] != OURS.name:
    _without_ours()
