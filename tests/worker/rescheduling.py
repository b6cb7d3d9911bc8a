"""Tasks that retry in every way that Celery allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject, Retry

from celery_idempotent import IdempotentTask
from tests.worker.failing_tasks import OutOfStockError
from tests.worker.ledger import Ledger


def _then_return(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    return "scheduled"


def _suppress(task: Any) -> str:
    with contextlib.suppress(Retry):
        raise task.retry(countdown=1)
    return "scheduled"


def _in_a_helper(task: Any) -> str:
    return _then_return(task)


def _twice(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    return _then_return(task)


def _then_raise(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise OutOfStockError("after the retry", 0)


def _then_ignore(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise Ignore


def _then_reject(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise Reject("after the retry", requeue=False)


def _raise_another_error(task: Any) -> str:
    try:
        raise task.retry(countdown=1)
    except Retry:
        raise OutOfStockError("while handling Retry", 0) from None


def _raise(task: Any) -> str:
    raise task.retry(countdown=1)


WAYS: dict[str, Callable[[Any], str]] = {
    "throw=False": _then_return,
    "suppressed": _suppress,
    "in a helper": _in_a_helper,
    "twice": _twice,
    "then an error": _then_raise,
    "then Ignore": _then_ignore,
    "then Reject": _then_reject,
    "then another error": _raise_another_error,
    "raised": _raise,
}


@shared_task(
    bind=True,
    base=IdempotentTask,
    name="shop.reschedule",
    idempotency_replay_errors=(OutOfStockError,),
)
def reschedule(self: Any, order: str, way: str) -> str:
    """Retries in the first execution, and returns in the second."""
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
    """Fails in the first execution, which Celery's option retries."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise OutOfStockError(order, 3)
        return "done"


@shared_task(bind=True, base=IdempotentTask, name="shop.change_and_show")
def change_and_show(self: Any, order: str, amount: int) -> str:
    """Retries with another amount, and returns the representation of its arguments."""
    if self.request.retries == 0:
        raise self.retry(args=(order, amount + 1), countdown=0)
    argsrepr: str = self.request.argsrepr
    return argsrepr


@shared_task(bind=True, base=IdempotentTask, name="shop.stop_here")
def stop_here(self: Any, order: str) -> str:
    """Drops its continuation."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.id == order:
            self.request.chain = self.request.callbacks = None
        return order
