"""A task that retries is not completed, however its body ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, shared_task
from celery.exceptions import Ignore, Retry

from celery_idempotent import IdempotentTask, State
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import report
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError


def _then_return(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    return "scheduled"


def _suppress(task: Any) -> str:
    with contextlib.suppress(Retry):
        raise task.retry(countdown=1)
    return "scheduled"


def _twice(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    return _then_return(task)


def _then_raise(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise OutOfStockError("after the retry", 0)


def _then_ignore(task: Any) -> str:
    task.retry(throw=False, countdown=1)
    raise Ignore


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
    "twice": _twice,
    "then an error": _then_raise,
    "then Ignore": _then_ignore,
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


@shared_task(bind=True, base=IdempotentTask, name="shop.stop_here")
def stop_here(self: Any, order: str) -> str:
    """Drops its continuation."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.id == order:
            self.request.chain = self.request.callbacks = None
        return order


pytestmark = pytest.mark.worker


# With "run", a stored result ends a reservation, but not that of a retry.
SHOP = {"imports": [__name__], "idempotency_on_store_error": "run"}


@pytest.mark.core
@pytest.mark.parametrize("way", exhaustive_except(WAYS, "suppressed", "twice", "then an error"))
def test_outcome_is_that_of_the_retry(ledger: Ledger, order: str, way: str) -> None:
    reschedule.delay(order, way)
    eventually(
        lambda: [run.end for run in ledger.runs(order)][1:] == ["returned"], "the retry has run"
    )

    assert reschedule.delay(order, way).get(timeout=SOON) == "done"
    assert len(ledger.runs(order)) == 2
    assert len({run.key for run in ledger.runs(order)}) == 1


def test_continuation_is_sent_as_in_plain_celery(shop: Shop, ledger: Ledger, order: str) -> None:
    """It is sent with the first value and again after the retry, as in plain Celery."""
    chain(reschedule.s(order, "throw=False"), report.s(order)).delay()

    eventually(lambda: len(ledger.notes(order)) == 2, "the continuation has run")
    shop.wait_until_empty()
    assert ledger.notes(order) == ['"scheduled"', '"done"']


def test_only_one_of_two_retries_runs(shop: Shop, ledger: Ledger, order: str) -> None:
    reschedule.delay(order, "twice")

    ledger.wait_for_run(order, 2)
    shop.wait_until_empty()
    assert len(ledger.runs(order)) == 2


def test_autoretry_for_reserves_the_key(ledger: Ledger, order: str) -> None:
    assert reschedule_by_itself.delay(order).get(timeout=SOON) == "done"
    assert [run.end for run in ledger.runs(order)] == ["OutOfStockError", "returned"]
    assert reschedule_by_itself.idempotency_record(order).state is State.COMPLETED


class TestDroppedContinuation:
    """``self.request.chain = None``"""

    @pytest.mark.parametrize("moment", [None, "before", "after"])
    def test_copy_of_the_message_does_not_send_it(
        self, shop: Shop, ledger: Ledger, order: str, moment: str | None
    ) -> None:
        if moment:
            ledger.kill_once(moment, order)
        canvas = chain(stop_here.s(order).set(task_id=order, queue="kept"), report.s(order))
        canvas.set(link_error=report.si("failed", order)).delay()
        message = shop.deliver_kept(order)
        ledger.wait_for_signal(order, "completed")
        shop.replay(message, order)
        assert ledger.notes(order) == []
        assert len(ledger.runs(order)) == 1
