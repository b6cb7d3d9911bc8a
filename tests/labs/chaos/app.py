"""The app whose workers are struck, the same for every contestant but for the base class.

Workers load this module; its tasks tell the ledger what they do, and its handlers what becomes of
messages.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery
from celery.signals import after_task_publish, task_received, worker_init
from kombu.message import Message

from celery_idempotent import signals
from tests.labs.chaos import downstream
from tests.labs.comparison.contestants import OURS, find_contestant
from tests.labs.outages.ledger import Ledger
from tests.worker.mortal import die_with_parent

NAME = "tests.labs.chaos.app"
CONFIG_VARIABLE = "CHAOS_PLAN"
QUEUE = "chaos"

#: Seconds between two looks whether a held task may go on.
POLL_INTERVAL = 0.01


class DeclinedError(Exception):
    """An outcome like any other: the order is declined, for good."""


@dataclass(frozen=True)
class AppConfig:
    """All that an app is made of; goes to workers as JSON."""

    contestant: str
    folder: str
    #: URL of the server that locks or records are on.
    store: str
    #: Of the system downstream, on 127.0.0.1.
    downstream: int
    #: Seconds that a lock or a lease lasts.
    lease: float
    settings: dict[str, Any] = field(default_factory=dict)
    #: Of the contestant's tasks.
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the value of `CONFIG_VARIABLE` for a worker."""
        return json.dumps(asdict(self))

    def ledger(self) -> Ledger:
        """Where tasks say what they do."""
        path = Path(self.folder) / "ledger"
        path.touch()
        return Ledger(path)


def make_app(config: AppConfig) -> Celery:
    """The app, with its tasks."""
    ledger = config.ledger()
    contestant = find_contestant(config.contestant)
    app = Celery("chaos", set_as_current=False)
    app.conf.update(contestant.settings(config.store))
    app.conf.update(config.settings)
    # Every contestant gets the crash safety that Celery itself has.
    options = {
        "bind": True,
        "shared": False,
        "acks_late": True,
        "reject_on_worker_lost": True,
        **contestant.task_options(config.lease),
        **config.options,
    }
    if contestant is OURS:
        options["idempotency_replay_errors"] = (DeclinedError,)

    def begin(task: Any, order: str) -> Callable[[], str]:
        """Tell that an execution begins; call what this returns for its effect."""
        execution = uuid4().hex
        token = task.idempotency.token if contestant is OURS else 0
        told = {"execution": execution, "order": order, "token": token}
        downstream.ask(config.downstream, order, execution, token)
        ledger.write("begun", **told, task_id=task.request.id, pid=os.getpid(), at=time.time())

        def effect() -> str:
            receipt = uuid4().hex
            accepted = downstream.ask(config.downstream, order, execution, token, receipt)
            ledger.write("done", **told, receipt=receipt, accepted=accepted, at=time.time())
            return receipt

        return effect

    @app.task(name="chaos.charge", **options)
    def charge(self: Any, order: str, seconds: float, ending: str) -> str:
        """Take so long, then have one effect."""
        effect = begin(self, order)
        if ending == "retries" and self.request.retries == 0:
            raise self.retry(countdown=0.2)
        time.sleep(seconds)
        receipt = effect()
        if ending == "declined":
            raise DeclinedError(receipt)
        return receipt

    @app.task(name="chaos.held", **options)
    def held(self: Any, order: str, until: str, checks: bool) -> str:
        """Have one effect as soon as there is a file `until`.

        Args:
            checks: ask first whether the lease is still there to be trusted.
        """
        effect = begin(self, order)
        while not Path(until).exists():
            time.sleep(POLL_INTERVAL)
        if checks:
            self.idempotency.check()
        return effect()

    # What becomes of messages, so that one which only the broker can have lost is known by it:
    # one that was published more often than it was acknowledged, and is nowhere.

    @after_task_publish.connect(weak=False)
    def published(headers: Mapping[str, Any], **_: Any) -> None:
        ledger.write("published", task_id=headers["id"])

    @task_received.connect(weak=False)
    def received(request: Any, **_: Any) -> None:
        ledger.write("received", task_id=request.id, at=time.time())

    @signals.completed.connect(weak=False)
    @signals.failed.connect(weak=False)
    def completed(task_id: str, token: int, **_: Any) -> None:
        ledger.write("completed", task_id=task_id, token=token)

    @signals.store_unavailable.connect(weak=False)
    def put_off(task_id: str, **_: Any) -> None:
        ledger.write("put off", task_id=task_id)

    @signals.outcome_unsaved.connect(weak=False)
    def unsaved(task_id: str, token: int, **_: Any) -> None:
        ledger.write("unsaved", task_id=task_id, token=token)

    def acknowledged(message: Message) -> None:
        ledger.write("acknowledged", task_id=message.headers.get("id"))

    _before(acknowledged)
    return app


def _before(acknowledged: Callable[[Message], None]) -> None:
    """Be told of each message that a worker is about to drop, by whatever way."""
    ack, reject = Message.ack, Message.reject

    @wraps(ack)
    def told_ack(self: Message, *args: Any, **kwargs: Any) -> Any:
        acknowledged(self)
        return ack(self, *args, **kwargs)

    @wraps(reject)
    def told_reject(self: Message, requeue: bool = False) -> Any:
        if not requeue:
            acknowledged(self)
        return reject(self, requeue=requeue)

    Message.ack, Message.reject = told_ack, told_reject


if CONFIG_VARIABLE in os.environ:
    app = make_app(AppConfig(**json.loads(os.environ[CONFIG_VARIABLE])))
    worker_init.connect(die_with_parent)
