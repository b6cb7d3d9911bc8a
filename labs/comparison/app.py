"""The Celery app of one contestant in one scenario: ``celery -A labs.comparison.app``.

All contestants have the same tasks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import task_postrun, task_success, worker_init

from labs.comparison.contestants import OURS, find_contestant
from labs.comparison.pushing import PushingApp
from tests.servers.program import die_with_parent
from tests.worker.ledger import Ledger

CONFIG_VARIABLE = "PEERS_PLAN"


@dataclass(frozen=True)
class AppConfig:
    """The configuration of an app; workers receive it as JSON."""

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

    def to_json(self) -> str:
        """Returns the value of `CONFIG_VARIABLE` for a worker."""
        return json.dumps(asdict(self))


def make_app(config: AppConfig, *, in_worker: bool = False) -> Celery:
    """Returns the app with its tasks."""
    contestant = find_contestant(config.contestant)
    if in_worker:
        app = contestant.make_worker_app("peers", config.backend, config.lock)
    else:
        app = contestant.make_app("peers")
    if isinstance(app, PushingApp):
        app.environment = {CONFIG_VARIABLE: config.to_json()}
    app.conf.update(broker_url=config.broker, result_backend=config.backend)
    app.conf.update(contestant.settings(config.locks))
    app.conf.update(broker_connection_retry_on_startup=True, **config.settings)
    # Every contestant gets the crash safety that Celery itself has.
    options = {
        "shared": False,
        "acks_late": True,
        "reject_on_worker_lost": True,
        **contestant.task_options(config.lock),
        **config.task_options,
    }

    def task(**own: Any) -> Any:
        if in_worker:
            return contestant.worker_task(app, config.locks, config.lock, **own, **options)
        return app.task(**own, **options)

    @task(bind=True, name="peers.work")
    def work(self: Any, order: str, seconds: float = 0.0) -> str:
        """Takes `seconds`; returns a receipt that differs for each execution."""
        with _ledger(config.ledger).run(order, self.request.id):
            time.sleep(seconds)
            return uuid4().hex

    @task(bind=True, name="peers.retry_once")
    def retry_once(self: Any, order: str) -> str:
        """Retries once, then returns a receipt."""
        with _ledger(config.ledger).run(order, self.request.id):
            if self.request.retries == 0:
                raise self.retry(countdown=0)
            return uuid4().hex

    @task(bind=True, name="peers.follow")
    def follow(self: Any, before: Any, order: str) -> Any:
        """Follows another task in a chain, or the header of a chord."""
        with _ledger(config.ledger).run(order, self.request.id):
            return before

    @task(name="peers.no_op")
    def no_op(order: str) -> None:
        """Does nothing."""

    return app


_ledger = cache(Ledger)


def _disconnect_signals() -> None:
    """Removes the overhead of celery-idempotent, which Celery loads as a command-line plugin."""
    from celery_idempotent.core.task.message import canvas

    task_success.disconnect(canvas.mark_continuation_sent)
    task_postrun.disconnect(canvas.free_frames)


app = None
if CONFIG_VARIABLE in os.environ:
    config = AppConfig(**json.loads(os.environ[CONFIG_VARIABLE]))
    app = make_app(config, in_worker=True)
    worker_init.connect(die_with_parent)
    # The environments of other libraries do not have it.
    has_ours = find_contestant(config.contestant).python == sys.executable
    if has_ours and config.contestant != OURS.name:
        _disconnect_signals()
