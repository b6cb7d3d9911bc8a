"""The shop's basic tasks: one for each option, which most tests use.

Most tasks share one body, :func:`handle`, and are named after the option that they set. Every
execution is recorded in the ledger.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

from celery import shared_task

from celery_idempotent import TASK_ID, IdempotentTask, LeaseLostError
from tests.waiting import SOON
from tests.worker.ledger import Ledger


def handle(self: Any, order: str, amount: int = 1) -> dict[str, Any]:
    """Handles an order; returns a receipt that differs for each execution."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return {"receipt": uuid4().hex, "amount": amount}


def task_of(body: Any, name: str, **options: Any) -> Any:
    """Returns a task with the given body."""
    return shared_task(body, bind=True, base=IdempotentTask, name=f"shop.{name}", **options)


pack = task_of(handle, "pack")
charge = task_of(handle, "charge", idempotency_key="order:{order}")
tick = task_of(handle, "tick", idempotency_key=TASK_ID)
open_door = task_of(handle, "open_door", idempotency_enabled=False, acks_late=True)
waiting = task_of(handle, "waiting", idempotency_on_conflict="wait")
short_wait = task_of(
    handle, "short_wait", idempotency_on_conflict="wait", idempotency_wait_timeout=0.3
)
raising = task_of(handle, "raising", idempotency_on_conflict="raise")
ignoring = task_of(handle, "ignoring", idempotency_on_conflict="ignore")
rejecting = task_of(handle, "rejecting", idempotency_on_conflict="reject")
labelled = task_of(handle, "labelled", idempotency_label="order {order}")
#: Seconds.
SHORT_LEASE = 2.0
short_lease = task_of(
    handle, "short_lease", idempotency_lease=SHORT_LEASE, idempotency_reservation_ttl=SHORT_LEASE
)
short_lease_waiting = task_of(
    handle, "short_lease_waiting", idempotency_lease=SHORT_LEASE, idempotency_on_conflict="wait",
    idempotency_wait_timeout=SOON,
)  # fmt: skip
frail = task_of(handle, "frail", idempotency_max_attempts=1)
reserved = task_of(handle, "reserved", idempotency_dedupe_publish=True)
silent = task_of(handle, "silent", ignore_result=True)
forgetful = task_of(handle, "forgetful", idempotency_store_result=False)
thrifty = task_of(handle, "thrifty", idempotency_max_result_size=10)
unguarded = task_of(handle, "unguarded", idempotency_on_store_error="run")
strict = task_of(handle, "strict", idempotency_on_store_error="raise")
#: Each with a store of its own; a worker's environment names them.
for _number, _url in enumerate(os.environ.get("SHOP_OTHER_STORES", "").split()):
    task_of(handle, f"elsewhere_{_number}", idempotency_redis_url=_url, idempotency_lease=2.0)


class UnsendableTask(IdempotentTask):
    """A task whose messages cannot be published again."""

    abstract = True

    def signature_from_request(self, *args: Any, **options: Any) -> Any:
        """Fails immediately."""
        raise OSError("the broker accepts no messages")


unsendable = shared_task(handle, bind=True, base=UnsendableTask, name="shop.unsendable")


class CatchingTask(IdempotentTask):
    """Turns every error of what it calls into a value."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the body returns, or its error."""
        try:
            return {"value": super().__call__(*args, **kwargs)}
        except Exception as error:
            return {"error": repr(error)}


class RunningTask(IdempotentTask):
    """Calls the body itself, as in Flask's documentation."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the body returns, or its error."""
        try:
            return {"value": self.run(*args, **kwargs)}
        except Exception as error:
            return {"error": repr(error)}


catching = shared_task(handle, bind=True, base=CatchingTask, name="shop.catching")
running = shared_task(handle, bind=True, base=RunningTask, name="shop.running")


@shared_task(bind=True, base=IdempotentTask, name="shop.give", idempotency_key="{order}")
def give(self: Any, order: str, value: Any) -> Any:
    """Returns `value`."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return value


def rule_with(fault: str, order: str) -> Any:
    """A key rule that raises or returns an invalid key."""
    if fault == "raises":
        raise LookupError(f"no such order: {order}")
    return {
        "none": None,
        "empty": "",
        "nan": float("nan"),
        "object": object(),
        "long": order * 300_000,
        "control": f"{order}\0\n\x1b[31m{{}}",
    }[fault]


def misrule(self: Any, fault: str, order: str) -> str:
    """Returns a receipt."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return uuid4().hex


misruled = task_of(misrule, "misruled", idempotency_key=rule_with)
misruled_early = task_of(
    misrule, "misruled_early", idempotency_key=rule_with, idempotency_dedupe_publish=True
)


@shared_task(bind=True, base=IdempotentTask, name="shop.unserialisable")
def unserialisable(self: Any, order: str) -> object:
    """Returns a value that cannot be serialized."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return object()


@shared_task(bind=True, base=IdempotentTask, name="shop.call_itself")
def call_itself(self: Any, order: str, depth: int) -> str:
    """Calls itself as a function."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return f"{depth} {call_itself(order, depth - 1)}" if depth else "0"


@shared_task(bind=True, base=IdempotentTask, name="shop.check_then_handle")
def check_then_handle(self: Any, order: str) -> dict[str, Any]:
    """Notes whether it still has its lease when its order is released."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        try:
            self.idempotency.check()
        except LeaseLostError as error:
            ledger.note(order, str(error))
        else:
            ledger.note(order, "has its lease")
        return {"receipt": uuid4().hex}
