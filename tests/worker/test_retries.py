"""A retry keeps the key of its call, which is reserved for it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_idempotent import State
from tests.waiting import SOON, eventually
from tests.worker.ledger import Ledger
from tests.worker.tasks import (
    OutOfStockError,
    change_then_handle,
    give_up,
    label_then_handle,
    try_at,
    try_in_vain,
    try_later,
)

pytestmark = pytest.mark.worker


@pytest.mark.exhaustive
def test_a_retry_reserves_the_key_for_its_task_id(ledger: Ledger, order: str) -> None:
    # Long enough for the first execution to end.
    result = try_later.delay(order, 1.0)
    eventually(lambda: result.state == "RETRY", "the task has retried")
    record = try_later.idempotency_record(order, 1.0)
    duplicate = ledger.duplicate(try_later, order, 1.0)

    assert (record.state, record.task_id) == (State.RESERVED, result.id)
    assert duplicate.get(timeout=SOON) == result.get(timeout=SOON)
    runs = ledger.runs(order)
    assert [(run.task_id, run.end) for run in runs] == [
        (result.id, "Retry"),
        (result.id, "returned"),
    ]
    assert [(run.attempt, run.recovered) for run in runs] == [(1, False)] * 2
    assert ledger.signals(result.id, "conflicted") == []


def test_a_retry_with_an_eta_as_text_keeps_the_key(ledger: Ledger, order: str) -> None:
    soon = (datetime.now(timezone.utc) + timedelta(seconds=0.2)).isoformat()

    assert try_at.delay(order, soon).get(timeout=SOON)

    assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]


def test_a_retry_without_a_countdown_waits_for_the_first_execution(
    ledger: Ledger, order: str
) -> None:
    # Celery publishes the retry before the execution ends, so it may be received earlier.
    result = try_later.delay(order, 0)

    assert result.get(timeout=SOON)
    assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]


def test_a_retry_with_other_arguments_keeps_its_key(ledger: Ledger, order: str) -> None:
    assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2

    retried, done = ledger.runs(order)
    assert retried.key == done.key
    assert change_then_handle.idempotency_record(order, 1).state is State.COMPLETED
    assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2
    assert len(ledger.runs(order)) == 2


@pytest.mark.parametrize("explicit", [False, True], ids=["of the rule", "of its call"])
def test_a_retry_with_headers_keeps_its_key(ledger: Ledger, order: str, explicit: bool) -> None:
    options = {"idempotency_key": f"request {order}"} if explicit else {}

    assert label_then_handle.apply_async((order, 1), **options).get(timeout=SOON) == 2
    retried, done = ledger.runs(order)
    assert retried.key == done.key


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
def test_a_retry_waiting_duplicate_has_its_own_retries(ledger: Ledger, order: str) -> None:
    first = give_up.delay(order, 1.0)
    eventually(lambda: first.state == "RETRY", "the task has retried")
    duplicate = ledger.duplicate(give_up, order, 1.0)

    with pytest.raises(OutOfStockError):
        duplicate.get(timeout=SOON)
    expected = [first.id] * 2 + [duplicate.id] * 2
    assert [run.task_id for run in ledger.runs(order)] == expected
