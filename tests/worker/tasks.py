"""The shop's basic tasks: one for each option, which most tests use.

Most tasks share one body, :func:`handle`, and are named after the option that they set. Every
execution is recorded in the ledger.
"""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import uuid4

from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry

from celery_idempotent import TASK_ID, IdempotentTask
from tests.worker.ledger import Ledger, recorded_run


def handle(self: Any, order: str, amount: int = 1) -> dict[str, Any]:
    """Handles an order; returns a receipt that differs for each execution."""
    with recorded_run(self, order):
        return {"receipt": uuid4().hex, "amount": amount}


def task_of(body: Any, name: str, **options: Any) -> Any:
    """Returns a task with the given body."""
    options.setdefault("base", IdempotentTask)
    return shared_task(body, bind=True, name=f"shop.{name}", **options)


#: Options that several tasks have.
KEYED: dict[str, Any] = {"idempotency_key": "{order}"}
IN_TURN: dict[str, Any] = {"idempotency_until": "finished"}
RESERVED: dict[str, Any] = {"idempotency_dedupe_publish": True}
pack = task_of(handle, "pack")
charge = task_of(handle, "charge", idempotency_key="order:{order}")
tick = task_of(handle, "tick", idempotency_key=TASK_ID)
open_door = task_of(handle, "open_door", idempotency_enabled=False, acks_late=True)
waiting = task_of(handle, "waiting", idempotency_on_conflict="wait")
raising = task_of(handle, "raising", idempotency_on_conflict="raise")
ignoring = task_of(handle, "ignoring", idempotency_on_conflict="ignore")
rejecting = task_of(handle, "rejecting", idempotency_on_conflict="reject")
labelled = task_of(handle, "labelled", idempotency_label="order {order}")
#: Seconds.
SHORT_LEASE = 2.0
SHORT = {"idempotency_lease": SHORT_LEASE, "idempotency_reservation_ttl": SHORT_LEASE}
short_lease = task_of(handle, "short_lease", **SHORT)
short_turn = task_of(handle, "short_turn", idempotency_lease=SHORT_LEASE, **IN_TURN)
frail = task_of(handle, "frail", idempotency_max_attempts=1)
reserved = task_of(handle, "reserved", **RESERVED)
silent = task_of(handle, "silent", ignore_result=True)
forgetful = task_of(handle, "forgetful", idempotency_store_result=False)
thrifty = task_of(handle, "thrifty", idempotency_max_result_size=10)
unguarded = task_of(handle, "unguarded", idempotency_on_store_error="run")
strict = task_of(handle, "strict", idempotency_on_store_error="raise")


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


catching = task_of(handle, "catching", base=CatchingTask)
running = task_of(handle, "running", base=RunningTask)


def sleep(self: Any, order: str, seconds: float, number: int = 0) -> list[float]:
    """Takes a while; returns its start, `number`, and its end."""
    start = time.time()
    time.sleep(seconds)
    return [start, number, time.time()]


sleepy_in_turn = task_of(sleep, "sleepy_in_turn", **KEYED, **IN_TURN)


@shared_task(bind=True, base=IdempotentTask, name="shop.give", idempotency_key="{order}")
def give(self: Any, order: str, value: Any) -> Any:
    """Returns `value`."""
    with recorded_run(self, order):
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
    return str(handle(self, order)["receipt"])


misruled = task_of(misrule, "misruled", idempotency_key=rule_with)


def return_object(self: Any, order: str) -> object:
    """Returns a value that cannot be serialized."""
    return handle(self, order) and object()


unserialisable = task_of(return_object, "unserialisable")


class UnretryableTask(IdempotentTask):
    """A task whose retries cannot be published."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """Fails for retries, like a connection that is reset."""
        if options.get("retries"):
            raise ConnectionResetError("the broker accepts no retries")
        return super().apply_async(*args, **options)


@shared_task(bind=True, base=UnretryableTask, name="shop.try_in_vain")
def try_in_vain(self: Any, order: str) -> str:
    """Retries in the first execution."""
    with recorded_run(self, order) as ledger:
        if len(ledger.runs(order)) == 1:
            raise self.retry(countdown=0)
        return "back"


class OutOfStockError(Exception):
    """An error with several arguments."""

    def __init__(self, article: str, left: int) -> None:
        super().__init__(article, left)


def run_out(self: Any, order: str, times: int = 1_000) -> str:
    """Fails in the first `times` executions."""
    with recorded_run(self, order) as ledger:
        if len(ledger.runs(order)) <= times:
            raise OutOfStockError(order, 3)
        return "found one"


flaky = task_of(run_out, "flaky")
final = task_of(run_out, "final", idempotency_replay_errors=(OutOfStockError,))
final_too = task_of(run_out, "final_too", idempotency_replay_errors=(OutOfStockError,))


#: Seconds after which a message is redelivered with `FAST_REDELIVERY`.
AFTER_VISIBILITY_TIMEOUT = 5.0


@shared_task(bind=True, name="shop.errback")
def errback(self: Any, order: str) -> None:
    """A plain Celery task as an errback; a redelivery of its message has the same task id."""
    Ledger.of(self.app).note(order, self.request.id)


@shared_task(bind=True, base=IdempotentTask, name="shop.lose_retry")
def lose_retry(self: Any, order: str) -> str:
    """Retries once, after its message has been redelivered; the retry is not published."""
    with recorded_run(self, order) as ledger:
        ledger.note(order, str(self.request.retries))
        if len(ledger.runs(order)) > 1:
            return "done"
        time.sleep(AFTER_VISIBILITY_TIMEOUT)
        raise Retry(when=0)


def try_again(self: Any, order: str, countdown: float, expires: float | None = None) -> str:
    """Retries once; the retry expires after `expires` seconds, or when its message does."""
    with recorded_run(self, order):
        if self.request.retries == 0:
            raise self.retry(countdown=countdown, **({"expires": expires} if expires else {}))
        return uuid4().hex


try_later = task_of(try_again, "try_later")
try_in_turn = task_of(try_again, "try_in_turn", **IN_TURN)
try_in_a_burst = task_of(try_again, "try_in_a_burst", idempotency_until="started")


def try_early(self: Any, order: str) -> str:
    """Retries once, and waits, if the order's retry is held, before this execution ends."""
    with recorded_run(self, order) as ledger:
        if self.request.retries:
            return uuid4().hex
        try:
            raise self.retry(countdown=0)
        finally:
            ledger.wait_for_release(f"retry of {order}")


try_early_in_turn = task_of(try_early, "try_early_in_turn", **IN_TURN)
try_early = task_of(try_early, "try_early")


@shared_task(bind=True, base=IdempotentTask, name="shop.change_then_handle")
def change_then_handle(self: Any, order: str, amount: int) -> int:
    """Retries once with another amount."""
    with recorded_run(self, order):
        if self.request.retries == 0:
            raise self.retry(args=(order, amount + 1), countdown=0)
        return amount


def label_then_handle(self: Any, order: str, amount: int, countdown: float = 0) -> int:
    """Retries once with another amount and with headers."""
    with recorded_run(self, order):
        if self.request.retries == 0:
            headers = {**(self.request.headers or {}), "label": "again"}
            raise self.retry(args=(order, amount + 1), countdown=countdown, headers=headers)
        assert self.request.headers["label"] == "again"
        return amount


label_in_turn = task_of(label_then_handle, "label_in_turn", **KEYED, **IN_TURN)


@shared_task(bind=True, base=IdempotentTask, name="shop.give_up", max_retries=1)
def give_up(self: Any, order: str, countdown: float = 0) -> None:
    """Retries until `max_retries`."""
    with recorded_run(self, order):
        raise self.retry(countdown=countdown, exc=OutOfStockError(order, 3))


def leave(self: Any, order: str, way: str) -> str:
    """Leaves the first execution by an exception that is not an error; returns in the next."""
    with recorded_run(self, order) as ledger:
        if len(ledger.runs(order)) == 1:
            raise EXITS[way]
        return "back"


EXITS: dict[str, BaseException] = {
    "SystemExit": SystemExit(1),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Ignore": Ignore(),
    "Reject": Reject("not this one", requeue=False),
    "requeue": Reject("not now", requeue=True),
}
leaving = task_of(leave, "leaving")
soft_limited = task_of(handle, "soft_limited", soft_time_limit=0.5)
unacked = task_of(run_out, "unacked", acks_on_failure_or_timeout=False)
hard_returning = task_of(handle, "hard_returning", time_limit=1.0, acks_on_failure_or_timeout=False)
hard_limited = task_of(handle, "hard_limited", time_limit=1.0)


def handle_in_turn(self: Any, order: str) -> dict[str, Any]:
    """Handles an order; notes when an execution starts and ends."""
    ledger = Ledger.of(self.app)
    ledger.note(order, f"start {os.getpid()}")
    try:
        return handle(self, order)
    finally:
        ledger.note(order, f"end {os.getpid()}")


once = task_of(handle_in_turn, "once")
in_turn = task_of(handle_in_turn, "in_turn", **IN_TURN)
skipping = task_of(handle_in_turn, "skipping", idempotency_on_conflict="ignore", **IN_TURN)
reserved_turn = task_of(handle_in_turn, "reserved_turn", **IN_TURN, **RESERVED)
collapsed = task_of(handle_in_turn, "collapsed", idempotency_until="started", **RESERVED)


def handle_newest(self: Any, order: str, amount: int = 1, fails: int = 0) -> dict[str, Any]:
    """Notes what it sees of its arguments, and returns them; `fails` times it asks for a retry."""
    with recorded_run(self, order) as ledger:
        seen = [*self.request.args, *self.request.kwargs.values()]
        ledger.note(order, f"runs {amount} as {seen[-1]}")
        if self.request.retries < fails:
            raise self.retry(countdown=0.1)
        return {"amount": amount}


class NotingTask(IdempotentTask):
    """Notes the arguments that its handlers get."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Notes them."""
        Ledger.of(self.app).note(args[0], f"before {args[1]}")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Notes them."""
        Ledger.of(self.app).note(args[0], f"success {args[1]}")


NEWEST: dict[str, Any] = {**KEYED, "idempotency_until": "started"}
burst_of = task_of(handle_newest, "burst_of", base=NotingTask, **NEWEST)
#: Seconds.
QUIET, LONGEST_QUIET = 1.0, 3.0
DEBOUNCE = {"idempotency_debounce": QUIET, "idempotency_debounce_max_wait": LONGEST_QUIET}
debounced = task_of(handle_newest, "debounced", **DEBOUNCE, **NEWEST)


def handle_until_replaced(self: Any, order: str, amount: int = 1, *, by: str = "check") -> Any:
    """Runs until its order is released; `by` says how it learns that it was replaced."""
    with recorded_run(self, order):
        if by != "nothing":
            while Ledger.of(self.app).is_held(f"{order} {amount}"):
                time.sleep(0.05)
                if by == "check":
                    self.idempotency.check()
            if by == "step":
                self.idempotency.step("late", Ledger.of(self.app).note, order, "step")
        return {"amount": amount}


#: Annotations, since an app whose tasks all have a transaction cannot have such tasks.
TAKES_KEY = {"idempotency_on_conflict": "replace"}
REPLACE = {"shop.replacing": TAKES_KEY, "shop.replacing_in_bursts": TAKES_KEY}
replacing = task_of(handle_until_replaced, "replacing", **KEYED, **IN_TURN)
replacing_in_bursts = task_of(handle_until_replaced, "replacing_in_bursts", **NEWEST)
each_message = task_of(handle_in_turn, "each_message", idempotency_key=TASK_ID)


def peak(notes: list[str]) -> int:
    """Returns how many executions ran at once, at most."""
    running = peak = 0
    for note in notes:
        running += 1 if note.startswith("start") else -1
        peak = max(peak, running)
    return peak
