"""The app of the workers, the same for every contestant except for the base class.

Its tasks record their executions in the ledger; its signal handlers record what happens to
messages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any
from uuid import uuid4
from zlib import crc32

import sqlalchemy as sa
from celery import Celery
from celery.signals import (
    after_task_publish,
    task_postrun,
    task_prerun,
    task_received,
    worker_init,
)
from kombu.message import Message

import celery_idempotent
from celery_idempotent import signals
from celery_idempotent.core.events.report import counters
from labs.chaos import downstream
from labs.chaos.schedule import LEASE
from labs.comparison.contestants import OURS, find_contestant
from labs.rig import late
from labs.rig.worker import ledger_of, plans_of, settings_of_worker

NAME = "labs.chaos.app"
QUEUE = "chaos"
#: Of the calls that are forgotten; they do not wait behind the others.
QUEUES = (QUEUE, "forgotten")

#: Between an order and a task id.
UNIT_SEPARATOR = "#"
#: Whether this process has the version of the library that is in this repository.
IS_THIS_VERSION = Path(celery_idempotent.__file__).parents[1] == Path(__file__).parents[2]


#: A task whose key is forgotten after each outcome.
FORGOTTEN = "chaos.forgotten"
#: The other tasks, by ``idempotency_until``.
TASKS = {
    "expired": "chaos.charge",
    "finished": "chaos.charge_in_turn",
    "started": "chaos.charge_collapsed",
}


def until_of(order: str, contestant: str) -> str:
    """Returns ``idempotency_until`` of the task of an order: every other one may run again."""
    untils = ("expired", "finished", "expired", "started")
    return untils[crc32(order.encode()) % 4] if contestant == OURS.name else "expired"


def unit_of(order: str, task_id: str, contestant: str) -> str:
    """Returns what may have one effect: an order, or one message of an order that may run again."""
    if until_of(order, contestant) == "expired":
        return order
    return f"{order.partition(UNIT_SEPARATOR)[0]}{UNIT_SEPARATOR}{task_id}"


#: What task bodies write: one row for each effect.
effects = sa.Table(
    "effects",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("execution", sa.String(32), nullable=False),
    sa.Column("receipt", sa.String(32), nullable=False),
)


class DeclinedError(Exception):
    """The order is declined; the error is the outcome of its key."""


def make_app(settings: Mapping[str, Any], *, in_worker: bool = False) -> Celery:
    """Returns the app with its tasks.

    Args:
        settings: also the name of the contestant, and the URLs of the store, of the downstream
            system, and of the database of `idempotency_transaction`; one of the last two.
    """
    ledger, store = ledger_of(settings), settings["lab_store"]
    account, database = settings.get("lab_downstream"), settings.get("lab_database")
    contestant = find_contestant(settings["lab_contestant"])
    if contestant is OURS:
        late.intercept(plans_of(settings))
    app = Celery("chaos", set_as_current=False)
    app.conf.update(contestant.settings(store))
    app.conf.update(settings)
    # Every contestant gets the crash safety that Celery itself has.
    options = {
        "bind": True,
        "shared": False,
        "acks_late": True,
        "reject_on_worker_lost": True,
        **contestant.task_options(LEASE),
    }
    if contestant is OURS:
        options["idempotency_replay_errors"] = (DeclinedError,)
    if database:
        options["idempotency_transaction"] = sa.create_engine(database)

    def task(name: str, **own: Any) -> Any:
        own = {"name": name, **own, **options}
        if in_worker:
            return contestant.worker_task(app, store, LEASE, **own)
        return app.task(**own)

    def begin(self: Any, order: str) -> Callable[[], str]:
        """Records the start of an execution; returns the function that has its effect."""
        execution, receipt = uuid4().hex, uuid4().hex
        token = self.idempotency.token if contestant is OURS else 0
        details = {"execution": execution, "order": order, "token": token}
        if account:
            downstream.send(account, order, execution, token)
        details["this_version"] = IS_THIS_VERSION
        ledger.write(
            "started", **details, task_id=self.request.id, pid=os.getpid(), started_at=time.time()
        )
        if database:
            # At once, so that faults meet an open transaction that has an effect.
            row = {"name": order, "execution": execution, "receipt": receipt}
            self.idempotency.connection.execute(effects.insert().values(row))

        def effect() -> str:
            accepted = not account or downstream.send(account, order, execution, token, receipt)
            ledger.write("effect", **details, receipt=receipt, accepted=accepted, at=time.time())
            return receipt

        return effect

    def charge(self: Any, order: str, seconds: float, ending: str) -> str:
        """Takes `seconds`, then has one effect."""
        effect = begin(self, unit_of(order, self.request.id, contestant.name))
        if ending == "retries" and self.request.retries == 0:
            raise self.retry(countdown=0.2)
        time.sleep(seconds)
        receipt = effect()
        if ending == "declined":
            raise DeclinedError(receipt)
        return receipt

    task(TASKS["expired"])(charge)
    if contestant is OURS:
        task(TASKS["finished"], idempotency_until="finished")(charge)
        collapsing = {"idempotency_until": "started", "idempotency_dedupe_publish": True}
        task(TASKS["started"], **collapsing)(charge)

        @task(FORGOTTEN, idempotency_key="{order}", queue=QUEUES[1])
        def forgotten(self: Any, order: str, number: int) -> str:
            """Has one effect for each `number`."""
            return begin(self, f"{order} {number}")()

    # A message that was published more often than acknowledged, and is no longer in the broker,
    # was lost by the broker's transport.

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
    def postponed(task_id: str, **_: Any) -> None:
        ledger.write("postponed", task_id=task_id)

    @signals.outcome_unsaved.connect(weak=False)
    def unsaved(task_id: str, token: int, **_: Any) -> None:
        ledger.write("unsaved", task_id=task_id, token=token)

    # Each delivery that ends has exactly one decision; one that is killed has at most one.

    delivery = threading.local()

    @task_prerun.connect(weak=False)
    def delivered(task_id: str, **_: Any) -> None:
        delivery.id = uuid4().hex
        ledger.write(
            "delivered", delivery=delivery.id, task_id=task_id, this_version=IS_THIS_VERSION
        )

    @task_postrun.connect(weak=False)
    def ended(**_: Any) -> None:
        ledger.write("ended", delivery=delivery.id)

    def count(name: str, task: str) -> None:
        if name in signals.DECISIONS:
            ledger.write("decided", delivery=delivery.id, decision=name)

    @worker_init.connect(weak=False)
    def count_decisions(**_: Any) -> None:
        if contestant is OURS:
            counters.append(count)

    def acknowledged(message: Message) -> None:
        ledger.write("acknowledged", task_id=message.headers.get("id"))

    _before_acknowledgement(acknowledged)
    return app


def _before_acknowledgement(callback: Callable[[Message], None]) -> None:
    """Calls `callback` before a message is acknowledged, or rejected without requeue."""
    ack, reject = Message.ack, Message.reject

    @wraps(ack)
    def observed_ack(self: Message, *args: Any, **kwargs: Any) -> Any:
        callback(self)
        return ack(self, *args, **kwargs)

    @wraps(reject)
    def observed_reject(self: Message, requeue: bool = False) -> Any:
        if not requeue:
            callback(self)
        return reject(self, requeue=requeue)

    Message.ack, Message.reject = observed_ack, observed_reject


if worker_settings := settings_of_worker():
    app = make_app(worker_settings, in_worker=True)
