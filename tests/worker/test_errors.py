"""Errors release the key, Celery's retry reserves it, and replay_errors are stored."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_idempotent import State
from tests.waiting import SOON, eventually
from tests.worker.failing_tasks import (
    OutOfStockError,
    change_then_handle,
    final,
    flaky,
    give_up,
    label_then_handle,
    try_at,
    try_in_vain,
    try_later,
)
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger

pytestmark = pytest.mark.worker


class TestError:
    def test_reaches_the_caller(self, ledger: Ledger, order: str) -> None:
        with pytest.raises(OutOfStockError) as caught:
            flaky.delay(order).get(timeout=SOON)

        assert caught.value.args == (order, 3)

    def test_releases_the_key_for_the_next_publish(self, ledger: Ledger, order: str) -> None:
        flaky.delay(order, times=1).get(timeout=SOON, propagate=False)

        assert flaky.delay(order, times=1).get(timeout=SOON) == "found one"
        assert [run.end for run in ledger.runs(order)] == ["OutOfStockError", "returned"]
        assert [run.attempt for run in ledger.runs(order)] == [1, 1]

    def test_waiting_duplicate_runs(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = flaky.delay(order, times=1)
        ledger.wait_for_run(order)
        duplicate = flaky.delay(order, times=1)
        ledger.wait_for_signal(duplicate.id, "conflicted")
        ledger.release(order)

        with pytest.raises(OutOfStockError):
            first.get(timeout=SOON)
        assert duplicate.get(timeout=SOON) == "found one"


class TestReplayErrors:
    def test_are_stored_as_the_outcome(self, shop: Shop, order: str) -> None:
        first = final.delay(order)
        first.get(timeout=SOON, propagate=False)

        record = final.idempotency_record(order)
        assert record.state is State.FAILED
        assert record.task_id == first.id
        assert isinstance(record.result, OutOfStockError)

    def test_are_raised_again_with_type_and_arguments(self, ledger: Ledger, order: str) -> None:
        errors = [final.delay(order).get(timeout=SOON, propagate=False) for _ in range(2)]

        assert [type(error) for error in errors] == [OutOfStockError] * 2
        assert [error.args for error in errors] == [(order, 3)] * 2
        assert len(ledger.runs(order)) == 1

    def test_duplicate_fails(self, ledger: Ledger, order: str) -> None:
        final.delay(order).get(timeout=SOON, propagate=False)
        duplicate = final.delay(order)

        with pytest.raises(OutOfStockError):
            duplicate.get(timeout=SOON)
        assert duplicate.state == "FAILURE"

    def test_waiting_duplicate_gets_the_error(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        final.delay(order)
        ledger.wait_for_run(order)
        duplicate = final.delay(order)
        ledger.wait_for_signal(duplicate.id, "conflicted")
        ledger.release(order)

        with pytest.raises(OutOfStockError):
            duplicate.get(timeout=SOON)
        assert len(ledger.runs(order)) == 1


class TestCelerysRetry:
    def test_reserves_the_key_for_its_task_id(self, shop: Shop, order: str) -> None:
        result = try_later.delay(order, 1.0)
        eventually(lambda: result.state == "RETRY", "the task has retried")

        record = try_later.idempotency_record(order, 1.0)
        assert record.state is State.RESERVED
        assert record.task_id == result.id

    def test_has_no_conflict(self, ledger: Ledger, order: str) -> None:
        # Long enough for the first execution to end.
        result = try_later.delay(order, 1.0)

        assert result.get(timeout=SOON)
        assert [run.task_id for run in ledger.runs(order)] == [result.id] * 2
        assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]
        assert ledger.signals(result.id, "conflicted") == []

    def test_counts_no_attempt(self, ledger: Ledger, order: str) -> None:
        try_later.delay(order, 0.1).get(timeout=SOON)

        assert [run.attempt for run in ledger.runs(order)] == [1, 1]
        assert [run.recovered for run in ledger.runs(order)] == [False, False]

    def test_duplicate_does_not_run_before_the_retry(self, ledger: Ledger, order: str) -> None:
        first = try_later.delay(order, 1.0)
        eventually(lambda: first.state == "RETRY", "the task has retried")
        duplicate = try_later.delay(order, 1.0)
        ledger.wait_for_signal(duplicate.id, "conflicted")

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert {run.task_id for run in ledger.runs(order)} == {first.id}

    def test_with_an_eta_as_text_keeps_the_key(self, ledger: Ledger, order: str) -> None:
        soon = (datetime.now(timezone.utc) + timedelta(seconds=0.2)).isoformat()

        assert try_at.delay(order, soon).get(timeout=SOON)

        assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]

    def test_without_a_countdown_waits_for_the_first_execution(
        self, ledger: Ledger, order: str
    ) -> None:
        # Celery publishes the retry before the execution ends, so it may be received earlier.
        result = try_later.delay(order, 0)

        assert result.get(timeout=SOON)
        assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]

    def test_with_other_arguments_keeps_its_key(self, ledger: Ledger, order: str) -> None:
        assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2

        retried, done = ledger.runs(order)
        assert retried.key == done.key
        assert change_then_handle.delay(order, 1).get(timeout=SOON) == 2
        assert len(ledger.runs(order)) == 2

    def test_with_headers_keeps_its_key(self, ledger: Ledger, order: str) -> None:
        assert label_then_handle.delay(order, 1).get(timeout=SOON) == 2

        retried, done = ledger.runs(order)
        assert retried.key == done.key

    def test_with_headers_keeps_the_key_of_its_call(self, ledger: Ledger, order: str) -> None:
        call = label_then_handle.apply_async((order, 1), idempotency_key=f"request {order}")
        assert call.get(timeout=SOON) == 2

        retried, done = ledger.runs(order)
        assert retried.key == done.key

    def test_that_cannot_be_published_requeues_the_message(
        self, ledger: Ledger, order: str
    ) -> None:
        assert try_in_vain.delay(order).get(timeout=SOON, propagate=False) == "back"

        assert [run.end for run in ledger.runs(order)] == ["Reject", "returned"]

    def test_after_max_retries_releases_the_key(self, ledger: Ledger, order: str) -> None:
        with pytest.raises(OutOfStockError):
            give_up.delay(order).get(timeout=SOON)
        assert give_up.idempotency_record(order) is None

        with pytest.raises(OutOfStockError):
            give_up.delay(order).get(timeout=SOON)
        assert [run.end for run in ledger.runs(order)] == ["Retry", "OutOfStockError"] * 2

    @pytest.mark.exhaustive
    def test_waiting_duplicate_has_its_own_retries(self, ledger: Ledger, order: str) -> None:
        first = give_up.delay(order, 1.0)
        eventually(lambda: first.state == "RETRY", "the task has retried")
        duplicate = give_up.delay(order, 1.0)
        ledger.wait_for_signal(duplicate.id, "conflicted")

        with pytest.raises(OutOfStockError):
            duplicate.get(timeout=SOON)
        expected = [first.id] * 2 + [duplicate.id] * 2
        assert [run.task_id for run in ledger.runs(order)] == expected
