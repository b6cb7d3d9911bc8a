"""Executions that exceed the broker's visibility timeout and fail.

The broker redelivers the message. The copy is requeued as a new message while the execution runs,
and later gets the stored error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult

from tests.waiting import SOON, eventually
from tests.worker.harness import COPIED_MESSAGES, Shop
from tests.worker.tasks import (
    AFTER_VISIBILITY_TIMEOUT,
    OutOfStockError,
    die_late_for_good,
    fail_late,
    fail_late_again,
    fail_late_as_expected,
    fail_late_at_length,
    fail_late_by_force,
    fail_late_by_the_clock,
    poll_late,
    report_failure,
)

pytestmark = pytest.mark.worker

#: For each way in which an execution ends: the task, and the error that its caller gets.
ENDINGS: dict[str, tuple[Any, type[Exception] | str]] = {
    "an error": (fail_late, OutOfStockError),
    "an error that the task throws": (fail_late_as_expected, OutOfStockError),
    "an error that cannot be pickled": (fail_late, "UnpickleableExceptionWrapper"),
    "retries that are used up": (fail_late_again, OutOfStockError),
    "an error that is too large": (fail_late_at_length, OutOfStockError),
    "a soft time limit": (fail_late_by_the_clock, SoftTimeLimitExceeded),
    "a hard time limit": (fail_late_by_force, TimeLimitExceeded),
    "a pool child that is lost": (die_late_for_good, WorkerLostError),
}
#: Expected executions, if not one.
RUNS = {"retries that are used up": 2}
#: Copies get the error from the result backend, without a replay.
WITHOUT_REPLAY = {"an error that is too large"}
#: Celery calls errbacks twice for a hard time limit.
ERRBACKS = {"a hard time limit": 2}


def order_of(ending: str) -> str:
    return f"order that ends in {ending}"


@pytest.mark.exhaustive
@pytest.mark.slow
class TestExecutionThatFails:
    @pytest.fixture(scope="class")
    @classmethod
    def quiet(cls, open_shop: Callable[..., Shop]) -> Iterator[tuple[Shop, dict[str, AsyncResult]]]:
        """Runs a call for each ending and empties the broker; yields the shop and the results."""
        with open_shop(**COPIED_MESSAGES) as shop:
            shop.start_worker(concurrency=10)
            results = {}
            for ending, (task, _) in ENDINGS.items():
                order = order_of(ending)
                signature = task.s(order, writable="pickled" not in ending)
                results[ending] = signature.apply_async(link_error=report_failure.si(order))
            for result in results.values():
                result.get(timeout=SOON, propagate=False)
            # An endless chain of executions would never empty the queue.
            shop.wait_until_empty()
            yield shop, results

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_runs_once_and_releases_the_key_for_other_task_ids(
        self, quiet: Any, ending: str
    ) -> None:
        shop, results = quiet
        (task, error), order = ENDINGS[ending], order_of(ending)
        result = shop.app.AsyncResult(results[ending].id)
        arguments = {"writable": "pickled" not in ending}

        runs = shop.ledger.runs(order)
        assert [run.task_id for run in runs] == [result.id] * RUNS.get(ending, 1)
        assert shop.ledger.signals(result.id, "conflicted"), "the message was redelivered"
        if ending not in WITHOUT_REPLAY:
            assert shop.ledger.signals(result.id, "replayed"), "the copy was replayed"
        assert result.state == "FAILURE"
        assert type(result.result) is error or type(result.result).__name__ == error
        # On a busy machine the message of an errback may be redelivered, too.
        assert len({*shop.ledger.notes(order)}) == ERRBACKS.get(ending, 1)
        assert task.idempotency_record(order, **arguments) is None
        task.delay(order, **arguments).forget()
        eventually(lambda: len(shop.ledger.runs(order)) > len(runs), "another task id runs")


@pytest.mark.exhaustive
class TestTwoTaskIdsWithOneKey:
    def test_run_once_each(self, open_shop: Callable[..., Shop], order: str) -> None:
        with open_shop(**COPIED_MESSAGES) as shop:
            shop.start_worker(concurrency=4)
            results = [fail_late.delay(order) for _ in range(2)]
            for result in results:
                result.get(timeout=SOON, propagate=False)

            shop.wait_until_empty()
            runs = shop.ledger.runs(order)
            assert sorted(run.task_id for run in runs) == sorted(result.id for result in results)


@pytest.mark.exhaustive
class TestExecutionThatRetries:
    def test_copy_does_not_run_before_the_retry(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(**COPIED_MESSAGES) as shop:
            shop.start_worker(concurrency=4)
            result = poll_late.delay(order, countdown=AFTER_VISIBILITY_TIMEOUT, times=2)

            assert result.get(timeout=2 * SOON) == "done"
            shop.wait_until_empty()
            assert shop.ledger.notes(order) == ["0", "1", "2"]
            assert len(shop.ledger.signals(result.id, "conflicted")) > 2

    def test_copy_runs_if_the_retry_is_lost(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(**COPIED_MESSAGES, idempotency_lease=AFTER_VISIBILITY_TIMEOUT) as shop:
            shop.start_worker(concurrency=4)
            result = poll_late.apply_async((order,), {"countdown": 0, "times": 1, "lost": True})
            started_at = time.time()

            assert result.get(timeout=2 * SOON) == "done"
            assert shop.ledger.notes(order) == ["0", "0"]
            assert shop.ledger.runs(order)[1].started_at > started_at + 2 * AFTER_VISIBILITY_TIMEOUT
