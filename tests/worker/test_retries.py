"""A retry keeps the key of its call, which is reserved for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_idempotent import State
from tests.waiting import SOON
from tests.worker.harness import COPIED_MESSAGES, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import (
    AFTER_VISIBILITY_TIMEOUT,
    OutOfStockError,
    change_then_handle,
    give_up,
    label_in_turn,
    lose_retry,
    try_in_vain,
)


def test_a_retry_with_other_arguments_keeps_its_key(ledger: Ledger, order: str) -> None:
    assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2

    retried, done = ledger.runs(order)
    assert retried.key == done.key
    assert change_then_handle.idempotency_record(order, 1).state is State.COMPLETED
    assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2
    assert len(ledger.runs(order)) == 2


def test_a_retry_of_a_message_that_was_put_back_has_its_countdown(
    ledger: Ledger, order: str
) -> None:
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
def test_a_copy_runs_if_the_retry_is_lost(open_shop: Callable[..., Shop], order: str) -> None:
    """The broker redelivers the message of an execution that exceeds the visibility timeout."""
    with open_shop(**COPIED_MESSAGES, idempotency_lease=AFTER_VISIBILITY_TIMEOUT) as shop:
        shop.start_worker(concurrency=4)
        result = lose_retry.delay(order)
        started_at = time.time()

        assert result.get(timeout=2 * SOON) == "done"
        assert shop.ledger.notes(order) == ["0", "0"]
        assert shop.ledger.runs(order)[1].started_at > started_at + 2 * AFTER_VISIBILITY_TIMEOUT
