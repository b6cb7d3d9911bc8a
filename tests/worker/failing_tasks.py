"""Tasks that retry, fail, or end without an outcome."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from uuid import uuid4

from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry

from celery_idempotent import TASK_ID, IdempotentTask
from tests.worker.ledger import Ledger
from tests.worker.tasks import handle, task_of


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
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            raise self.retry(countdown=0)
        return "back"


class OutOfStockError(Exception):
    """An error with several arguments."""

    def __init__(self, article: str, left: int) -> None:
        super().__init__(article, left)


def run_out(self: Any, order: str, times: int = 1_000) -> str:
    """Fails in the first `times` executions."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) <= times:
            raise OutOfStockError(order, 3)
        return "found one"


flaky = task_of(run_out, "flaky")
flaky_tick = task_of(run_out, "flaky_tick", idempotency_key=TASK_ID)
flaky_in_turn = task_of(run_out, "flaky_in_turn", idempotency_until="finished")
final = task_of(run_out, "final", idempotency_replay_errors=(OutOfStockError,))
final_together = task_of(run_out, "final_together", idempotency_replay_errors=(OutOfStockError,))
final_unstored = task_of(
    run_out, "final_unstored", idempotency_store_result=False,
    idempotency_replay_errors=(OutOfStockError,),
)  # fmt: skip
final_in_turn = task_of(
    run_out, "final_in_turn", idempotency_until="finished",
    idempotency_replay_errors=(OutOfStockError,),
)  # fmt: skip


def fail_twice(self: Any, order: str) -> None:
    """Fails for good in the first execution, and with another error in all others."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        raise OutOfStockError(order, 3) if len(ledger.runs(order)) == 1 else LookupError(order)


final_once = task_of(fail_twice, "final_once", idempotency_replay_errors=(OutOfStockError,))
#: Seconds after which a message is redelivered with `FAST_REDELIVERY`.
AFTER_VISIBILITY_TIMEOUT = 5.0


class UnwritableError(Exception):
    """An error that neither pickle nor JSON can serialize."""

    def __init__(self) -> None:
        super().__init__(lambda: None)


@shared_task(bind=True, name="shop.report_failure")
def report_failure(self: Any, order: str) -> None:
    """A plain Celery task as an errback; a redelivery of its message has the same task id."""
    Ledger.of(self.app).note(order, self.request.id)


def run_late(self: Any, order: str, writable: bool = True) -> None:
    """Fails after its message has been redelivered."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        time.sleep(AFTER_VISIBILITY_TIMEOUT)
        if self.soft_time_limit or self.time_limit:
            time.sleep(AFTER_VISIBILITY_TIMEOUT)
        raise OutOfStockError(order, 3) if writable else UnwritableError


def die_late(self: Any, order: str, writable: bool = True) -> None:
    """Kills its pool process after its message has been redelivered."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        time.sleep(AFTER_VISIBILITY_TIMEOUT)
        os.kill(os.getpid(), signal.SIGKILL)


die_late_for_good = task_of(die_late, "die_late_for_good", reject_on_worker_lost=False)
fail_late = task_of(run_late, "fail_late")
fail_late_as_expected = task_of(run_late, "fail_late_as_expected", throws=(OutOfStockError,))
fail_late_again = task_of(
    run_late, "fail_late_again", autoretry_for=(OutOfStockError,), max_retries=1,
    default_retry_delay=0,
)  # fmt: skip
fail_late_at_length = task_of(run_late, "fail_late_at_length", idempotency_max_result_size=10)
fail_late_by_the_clock = task_of(
    run_late, "fail_late_by_the_clock", soft_time_limit=AFTER_VISIBILITY_TIMEOUT
)
fail_late_by_force = task_of(run_late, "fail_late_by_force", time_limit=AFTER_VISIBILITY_TIMEOUT)


@shared_task(bind=True, base=IdempotentTask, name="shop.poll_late", max_retries=None)
def poll_late(self: Any, order: str, countdown: float, times: int, lost: bool = False) -> str:
    """Retries `times` times, each time after its message has been redelivered."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        ledger.note(order, str(self.request.retries))
        if len(ledger.runs(order)) > times:
            return "done"
        time.sleep(AFTER_VISIBILITY_TIMEOUT)
        if lost:
            raise Retry(when=countdown)
        raise self.retry(countdown=countdown)


def try_again(self: Any, order: str, countdown: float, expires: float | None = None) -> str:
    """Retries once; the retry expires after `expires` seconds, or when its message does."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(countdown=countdown, **({"expires": expires} if expires else {}))
        return uuid4().hex


try_later = task_of(try_again, "try_later")
try_later_in_turn = task_of(try_again, "try_later_in_turn", idempotency_until="finished")
try_later_in_a_burst = task_of(try_again, "try_later_in_a_burst", idempotency_until="started")


@shared_task(bind=True, base=IdempotentTask, name="shop.try_at")
def try_at(self: Any, order: str, eta: str) -> str:
    """Retries once, at a time given as text."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(eta=eta)
        return uuid4().hex


@shared_task(bind=True, base=IdempotentTask, name="shop.change_then_handle")
def change_then_handle(self: Any, order: str, amount: int) -> int:
    """Retries once with another amount."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(args=(order, amount + 1), countdown=0)
        return amount


@shared_task(
    bind=True, base=IdempotentTask, name="shop.label_then_handle", idempotency_key="{order}"
)
def label_then_handle(self: Any, order: str, amount: int) -> int:
    """Retries once with another amount and with headers."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(args=(order, amount + 1), countdown=0, headers={"label": "again"})
        assert self.request.headers["label"] == "again"
        return amount


@shared_task(bind=True, base=IdempotentTask, name="shop.give_up", max_retries=1)
def give_up(self: Any, order: str, countdown: float = 0) -> None:
    """Retries until `max_retries`."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        raise self.retry(countdown=countdown, exc=OutOfStockError(order, 3))


def leave(self: Any, order: str, way: str) -> str:
    """Leaves the first execution by an exception that is not an error; returns in the next."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
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
dead_lettered = task_of(run_out, "dead_lettered", acks_on_failure_or_timeout=False)
hard_limited_again = task_of(
    handle, "hard_limited_again", time_limit=1.0, acks_on_failure_or_timeout=False
)
hard_limited = task_of(handle, "hard_limited", time_limit=1.0)


def die(self: Any, order: str) -> None:
    """Kills its pool process."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        os.kill(os.getpid(), signal.SIGKILL)


poison = task_of(die, "poison", idempotency_max_attempts=2)
