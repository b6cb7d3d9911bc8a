"""Tasks that schedule themselves again, in every way that Celery allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry

from celery_idempotent import IdempotentTask
from tests.worker.ledger import Ledger
from tests.worker.shop import OutOfStockError


def _return_all_the_same(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    return "scheduled"


def _suppress_it(task: Any) -> str:
    with contextlib.suppress(Retry):
        raise task.retry(countdown=1)
    return "scheduled"


def _in_a_helper(task: Any) -> str:
    return _return_all_the_same(task)


def _twice(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    return _return_all_the_same(task)


def _raise_all_the_same(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise OutOfStockError("all the same", 0)


def _ignore_all_the_same(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise Ignore


def _reject_all_the_same(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise Reject("all the same", requeue=False)


def _raise_another(task: Any) -> str:
    try:
        raise task.retry(countdown=1)
    except Retry:
        raise OutOfStockError("in handling it", 0) from None


def _raise_it(task: Any) -> str:
    raise task.retry(countdown=1)


WAYS: dict[str, Callable[[Any], str]] = {
    "throw=False": _return_all_the_same,
    "suppressed": _suppress_it,
    "in a helper": _in_a_helper,
    "twice": _twice,
    "then an error": _raise_all_the_same,
    "then Ignore": _ignore_all_the_same,
    "then Reject": _reject_all_the_same,
    "then another error": _raise_another,
    "raised": _raise_it,
}


@shared_task(
    bind=True,
    base=IdempotentTask,
    name="shop.reschedule",
    idempotency_replay_errors=(OutOfStockError,),
)
def reschedule(self: Any, order: str, way: str) -> str:
    """Schedule itself again in the first run, and end in the second."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        return WAYS[way](self) if self.request.retries == 0 else "done"


@shared_task(
    bind=True,
    base=IdempotentTask,
    name="shop.reschedule_by_itself",
    autoretry_for=(OutOfStockError,),
    retry_kwargs={"countdown": 0},
    idempotency_replay_errors=(OutOfStockError,),
)
def reschedule_by_itself(self: Any, order: str) -> str:
    """Fail in the first run, which Celery's option retries."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise OutOfStockError(order, 3)
        return "done"


@shared_task(bind=True, base=IdempotentTask, name="shop.change_and_show")
def change_and_show(self: Any, order: str, amount: int) -> str:
    """Retry with another amount, and return how the arguments are shown then."""
    if self.request.retries == 0:
        raise self.retry(args=(order, amount + 1), countdown=0)
    shown: str = self.request.argsrepr
    return shown


@shared_task(bind=True, base=IdempotentTask, name="shop.stop_here")
def stop_here(self: Any, order: str) -> str:
    """Drop whatever was to follow."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.id == order:
            self.request.chain = self.request.callbacks = None
        return order
