"""Errors release the key, Celery's retry reserves it, and replay_errors are stored."""

from __future__ import annotations

import pytest

from celery_idempotent import State
from tests.waiting import SOON
from tests.worker.ledger import Ledger
from tests.worker.tasks import (
    OutOfStockError,
    final,
    flaky,
)

pytestmark = pytest.mark.worker


class TestError:
    def test_reaches_the_caller_and_releases_the_key(self, ledger: Ledger, order: str) -> None:
        with pytest.raises(OutOfStockError) as caught:
            flaky.delay(order, times=1).get(timeout=SOON)
        assert caught.value.args == (order, 3)
        assert flaky.delay(order, times=1).get(timeout=SOON) == "found one"

        assert [run.end for run in ledger.runs(order)] == ["OutOfStockError", "returned"]
        assert [run.attempt for run in ledger.runs(order)] == [1, 1]

    def test_waiting_duplicate_runs(self, ledger: Ledger, order: str) -> None:
        first = ledger.start(flaky, order, 1)
        duplicate = ledger.duplicate(flaky, order, times=1)
        ledger.release(order)

        with pytest.raises(OutOfStockError):
            first.get(timeout=SOON)
        assert duplicate.get(timeout=SOON) == "found one"


class TestReplayErrors:
    def test_are_stored_and_raised_again_with_type_and_arguments(
        self, ledger: Ledger, order: str
    ) -> None:
        results = [final.delay(order)]
        results[0].get(timeout=SOON, propagate=False)
        record = final.idempotency_record(order)
        results.append(final.delay(order))
        errors = [result.get(timeout=SOON, propagate=False) for result in results]

        assert (record.state, record.task_id) == (State.FAILED, results[0].id)
        assert isinstance(record.result, OutOfStockError)
        assert [type(error) for error in errors] == [OutOfStockError] * 2
        assert [error.args for error in errors] == [(order, 3)] * 2
        assert results[1].state == "FAILURE"
        assert len(ledger.runs(order)) == 1

    def test_waiting_duplicate_gets_the_error(self, ledger: Ledger, order: str) -> None:
        ledger.start(final, order)
        duplicate = ledger.duplicate(final, order)
        ledger.release(order)

        with pytest.raises(OutOfStockError):
            duplicate.get(timeout=SOON)
        assert len(ledger.runs(order)) == 1
