"""A retry keeps the key of its call, which is not completed, however the body ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import chain, shared_task
from celery.exceptions import Ignore, Retry

from celery_idempotent import IdempotentTask, State
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import report
from tests.worker.harness import COPIED_MESSAGES, OpenShop, Shop
from tests.worker.ledger import Ledger, recorded_run
from tests.worker.tasks import (
    AFTER_VISIBILITY_TIMEOUT,
    OutOfStockError,
    change_then_handle,
    give_up,
    label_in_turn,
    lose_retry,
    run_out,
    task_of,
    try_in_vain,
)

#: Ways in which a body asks for a retry, and ends.
WAYS = (
    *("throw=False", "twice", "then an error", "then Ignore"),
    *("suppressed", "then another error", "raised"),
)


def ask_for_a_retry(task: Any, way: str) -> str:
    if way in ("suppressed", "then another error", "raised"):
        try:
            raise task.retry(countdown=1)
        except Retry:
            if way == "raised":
                raise
            if way == "then another error":
                raise OutOfStockError("while handling Retry", 0) from None
            return "scheduled"
    for _ in range(2 if way == "twice" else 1):
        task.retry(throw=False, countdown=1)
    if way == "then an error":
        raise OutOfStockError("after the retry", 0)
    if way == "then Ignore":
        raise Ignore
    return "scheduled"


REPLAYED: dict[str, Any] = {"idempotency_replay_errors": (OutOfStockError,)}


@shared_task(bind=True, base=IdempotentTask, name="shop.reschedule", **REPLAYED)
def reschedule(self: Any, order: str, way: str) -> str:
    """Retries in the first execution, and returns in the second."""
    with recorded_run(self, order):
        return ask_for_a_retry(self, way) if self.request.retries == 0 else "done"


AUTORETRY: dict[str, Any] = {"autoretry_for": (OutOfStockError,), "retry_kwargs": {"countdown": 0}}
rescheduled_by_celery = task_of(run_out, "rescheduled_by_celery", **AUTORETRY, **REPLAYED)


@shared_task(bind=True, base=IdempotentTask, name="shop.stop_here")
def stop_here(self: Any, order: str) -> str:
    """Drops its continuation."""
    with recorded_run(self, order):
        if self.request.id == order:
            self.request.chain = self.request.callbacks = None
        return order


# With "run", a stored result ends a reservation, but not that of a retry.
SHOP = {"imports": [__name__], "idempotency_on_store_error": "run"}


@pytest.mark.core
@pytest.mark.parametrize("way", exhaustive_except(WAYS, "suppressed", "twice", "then an error"))
def test_outcome_is_that_of_the_retry(ledger: Ledger, order: str, way: str) -> None:
    reschedule.delay(order, way)
    eventually(lambda: [run.end for run in ledger.runs(order)][1:] == ["returned"], "it has run")

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
    assert rescheduled_by_celery.delay(order, 1).get(timeout=SOON) == "found one"
    assert [run.end for run in ledger.runs(order)] == ["OutOfStockError", "returned"]
    assert rescheduled_by_celery.idempotency_record(order, 1).state is State.COMPLETED


@pytest.mark.parametrize("moment", [None, "before", "after"])
def test_copy_of_the_message_does_not_send_a_dropped_continuation(
    shop: Shop, ledger: Ledger, order: str, moment: str | None
) -> None:
    """``self.request.chain = None``"""
    if moment:
        ledger.kill_once(moment, order)
    canvas = chain(stop_here.s(order).set(task_id=order, queue="kept"), report.s(order))
    canvas.set(link_error=report.si("failed", order)).delay()
    message = shop.deliver_kept(order)
    ledger.wait_for_signal(order, "completed")
    shop.replay(message, order)
    assert ledger.notes(order) == []
    assert len(ledger.runs(order)) == 1


def test_a_retry_with_other_arguments_keeps_its_key(ledger: Ledger, order: str) -> None:
    assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2

    retried, done = ledger.runs(order)
    assert retried.key == done.key
    assert change_then_handle.idempotency_record(order, 1).state is State.COMPLETED
    assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2
    assert len(ledger.runs(order)) == 2


def test_a_retry_of_a_message_put_back_has_its_countdown(ledger: Ledger, order: str) -> None:
    """Also if it forwards the headers of the message, which has waited for another call."""
    first = ledger.start(label_in_turn, order, 1, 2.0)
    second = ledger.duplicate(label_in_turn, order, 1, 2.0)
    ledger.release(order)

    assert [first.get(timeout=SOON), second.get(timeout=SOON)] == [2, 2]
    runs = ledger.runs(order)
    assert [run.task_id for run in runs] == [first.id] * 2 + [second.id] * 2
    assert runs[3].started_at - runs[2].started_at >= 2.0


def test_a_retry_that_cannot_be_published_requeues_the_message(ledger: Ledger, order: str) -> None:
    assert try_in_vain.delay(order).get(timeout=SOON, propagate=False) == "back"

    assert [run.end for run in ledger.runs(order)] == ["Reject", "returned"]


def test_a_retry_after_max_retries_releases_the_key(ledger: Ledger, order: str) -> None:
    with pytest.raises(OutOfStockError):
        give_up.delay(order).get(timeout=SOON)
    assert give_up.idempotency_record(order) is None

    with pytest.raises(OutOfStockError):
        give_up.delay(order).get(timeout=SOON)
    assert [run.end for run in ledger.runs(order)] == ["Retry", "OutOfStockError"] * 2


@pytest.mark.exhaustive
def test_a_copy_runs_if_the_retry_is_lost(open_shop: OpenShop, order: str) -> None:
    """The broker redelivers the message of an execution that exceeds the visibility timeout."""
    with open_shop(**COPIED_MESSAGES, idempotency_lease=AFTER_VISIBILITY_TIMEOUT) as shop:
        shop.start_worker(concurrency=4)
        result = lose_retry.delay(order)
        started_at = time.time()

        assert result.get(timeout=2 * SOON) == "done"
        assert shop.ledger.notes(order) == ["0", "0"]
        assert shop.ledger.runs(order)[1].started_at > started_at + 2 * AFTER_VISIBILITY_TIMEOUT
