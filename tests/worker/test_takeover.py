"""Executions that die or freeze: another one takes over, and one outcome stands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from celery.result import AsyncResult

from celery_idempotent import PoisonedTaskError, State
from tests.waiting import SOON, eventually
from tests.worker.frozen import FIRST_QUEUE, LEASE, Thawed, freeze_past_the_lease
from tests.worker.harness import SOON_VISIBLE, Shop
from tests.worker.ledger import Ledger, Run
from tests.worker.shop import check_then_handle, pack, poison

pytestmark = pytest.mark.worker


@dataclass(frozen=True)
class Recovered:
    """What came of an execution whose process was killed, and of the one that took over."""

    result: AsyncResult
    killed: Run
    killed_at: float
    again: Run
    was_of_the_pool: bool


@pytest.mark.core
class TestPoolChildKilled:
    """The worker's main process lives: it sees its child die, and ends the lease."""

    ORDER = "of a child that is killed"

    @pytest.fixture(scope="class")
    @classmethod
    def recovered(cls, shared_shop: Shop) -> Recovered:
        shared_shop.app.set_current()
        ledger = shared_shop.ledger
        ledger.hold(cls.ORDER)
        result = pack.delay(cls.ORDER)
        killed = ledger.wait_for_run(cls.ORDER)
        was_of_the_pool = killed.pid in shared_shop.workers[0].children()
        os.kill(killed.pid, signal.SIGKILL)
        killed_at = time.time()
        ledger.release(cls.ORDER)
        result.get(timeout=SOON)
        _, again = ledger.runs(cls.ORDER)
        return Recovered(result, killed, killed_at, again, was_of_the_pool)

    def test_the_task_runs_again_long_before_the_lease_ends(self, recovered: Recovered) -> None:
        assert recovered.was_of_the_pool
        assert recovered.again.started_at - recovered.killed_at < 15, "the lease is of 60 s"

    def test_the_second_run_knows_that_it_recovers(self, recovered: Recovered) -> None:
        killed, again = recovered.killed, recovered.again
        assert (killed.attempt, killed.recovered) == (1, False)
        assert (again.attempt, again.recovered) == (2, True)
        assert again.task_id == killed.task_id
        assert again.token > killed.token

    def test_the_takeover_is_told(self, ledger: Ledger, recovered: Recovered) -> None:
        task_id, again = recovered.result.id, recovered.again
        names = [told.name for told in ledger.signals(task_id)]
        assert names == ["begun", "begun", "taken_over", "completed"]
        (told,) = ledger.signals(task_id, "taken_over")
        assert told.sender == "shop.pack"
        assert 0 <= told.details.pop("orphaned_seconds") < SOON
        assert told.details == {
            "task_id": task_id,
            "key": again.key,
            "token": again.token,
            "attempt": 2,
        }

    def test_there_is_one_completion(self, ledger: Ledger, recovered: Recovered) -> None:
        assert pack.delay(self.ORDER).get(timeout=SOON) == recovered.result.get(timeout=SOON)
        assert [run.end for run in ledger.runs(self.ORDER)] == [None, "returned"]
        assert len(ledger.signals(recovered.result.id, "completed")) == 1


class TestWorkerKilled:
    """Nobody is left to tell: the lease ends by itself, and the broker hands the message out."""

    def test_another_worker_takes_over(self, open_shop: Callable[..., Shop], order: str) -> None:
        with open_shop(idempotency_lease=LEASE, broker_transport_options=SOON_VISIBLE) as shop:
            first = shop.start_worker(concurrency=1)
            shop.ledger.hold(order)
            result = pack.delay(order)
            killed = shop.ledger.wait_for_run(order)
            shop.start_worker(concurrency=1)
            first.kill()
            shop.ledger.release(order)

            assert result.get(timeout=SOON)["receipt"]
            again = shop.ledger.runs(order)[1]
            assert (again.task_id, again.attempt, again.recovered) == (result.id, 2, True)
            assert again.token > killed.token
            assert [run.end for run in shop.ledger.runs(order)] == [None, "returned"]
            shop.wait_until_empty()

    def test_a_duplicate_takes_over_before_the_broker_knows(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        # Kombu's visibility timeout is an hour here.
        with open_shop(idempotency_lease=LEASE) as shop:
            first = shop.start_worker(concurrency=1)
            shop.ledger.hold(order)
            pack.delay(order)
            shop.ledger.wait_for_run(order)
            shop.start_worker(concurrency=1)
            first.kill()
            shop.ledger.release(order)
            duplicate = pack.delay(order)

            assert duplicate.get(timeout=SOON)["receipt"]
            killed, again = shop.ledger.runs(order)
            assert (again.task_id, again.attempt, again.recovered) == (duplicate.id, 2, True)
            assert again.started_at - killed.started_at >= LEASE


class TestTaskThatKillsItsWorker:
    """``idempotency_max_attempts``, here 2."""

    @pytest.fixture(scope="class")
    @classmethod
    def poisoned(cls, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
        with open_shop() as shop:
            shop.start_worker(concurrency=1)
            poison.apply_async(("poisonous",), task_id="poison").get(timeout=SOON, propagate=False)
            yield shop

    def test_runs_as_often_as_allowed(self, poisoned: Shop) -> None:
        runs = poisoned.ledger.runs("poisonous")

        assert [run.attempt for run in runs] == [1, 2]
        assert [run.end for run in runs] == [None] * 2

    def test_ends_as_poisoned(self, poisoned: Shop) -> None:
        with pytest.raises(PoisonedTaskError, match="has begun 2 times"):
            poisoned.app.AsyncResult("poison").get(timeout=SOON)
        assert poison.idempotency_record("poisonous").state is State.FAILED

    def test_leaves_no_message(self, poisoned: Shop) -> None:
        poisoned.wait_until_empty()

    def test_answers_duplicates_with_the_same_error(self, poisoned: Shop) -> None:
        with pytest.raises(PoisonedTaskError, match="has begun 2 times"):
            poison.delay("poisonous").get(timeout=SOON)
        assert len(poisoned.ledger.runs("poisonous")) == 2


class TestOwnerFrozen:
    """SIGSTOP, as a swapping machine or a paused one looks like from outside."""

    @pytest.fixture(scope="class")
    @classmethod
    def thawed(cls, open_shop: Callable[..., Shop]) -> Iterator[Thawed]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, pack, "frozen")

    def test_another_execution_takes_over(self, thawed: Thawed) -> None:
        assert (thawed.winner.attempt, thawed.winner.recovered) == (2, True)
        assert thawed.winner.started_at - thawed.frozen.started_at >= LEASE

    def test_the_second_token_is_higher(self, thawed: Thawed) -> None:
        assert thawed.winner.token > thawed.frozen.token

    def test_both_callers_get_the_winners_result(self, thawed: Thawed) -> None:
        assert thawed.receipts[0] == thawed.receipts[1]

    def test_the_late_completion_is_refused(self, thawed: Thawed) -> None:
        assert thawed.frozen.end == "returned"
        names = [signal.name for signal in thawed.signals_of_frozen]
        assert "completed" not in names
        assert names[-1] == "replayed"

    def test_the_loss_is_told_once(self, thawed: Thawed) -> None:
        (told,) = (signal for signal in thawed.signals_of_frozen if signal.name == "lease_lost")
        assert told.sender == "shop.pack"
        assert told.details == {
            "task_id": thawed.frozen.task_id,
            "key": thawed.frozen.key,
            "token": thawed.frozen.token,
            "attempt": 1,
        }


class TestCheckAfterALostLease:
    @pytest.fixture(scope="class")
    @classmethod
    def thawed(cls, open_shop: Callable[..., Shop]) -> Iterator[Thawed]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, check_then_handle, "frozen")

    def test_raises(self, thawed: Thawed) -> None:
        # The winner wrote first.
        assert thawed.notes[0] == "the lease holds"
        assert thawed.frozen.key in thawed.notes[1]


class TestAbort:
    """``idempotency_on_lease_lost="abort"``."""

    @pytest.fixture(scope="class")
    @classmethod
    def thawed(cls, open_shop: Callable[..., Shop]) -> Iterator[Thawed]:
        with open_shop(idempotency_lease=LEASE, idempotency_on_lease_lost="abort") as shop:
            yield stay_busy_past_the_lease(shop, "aborted")

    def test_stops_the_execution_that_lost_its_lease(self, thawed: Thawed) -> None:
        assert thawed.frozen.end == "LeaseLostError"

    def test_both_callers_get_the_winners_result(self, thawed: Thawed) -> None:
        assert thawed.receipts[0] == thawed.receipts[1]

    def test_the_loss_is_told_once(self, thawed: Thawed) -> None:
        names = [signal.name for signal in thawed.signals_of_frozen]
        assert names.count("lease_lost") == 1
        assert "completed" not in names


def stay_busy_past_the_lease(shop: Shop, order: str) -> Thawed:
    """As `freeze_past_the_lease`, but the thawed execution still has work to do."""
    ledger = shop.ledger
    execution_id = shop.start_worker("--queues", FIRST_QUEUE, concurrency=1)
    ledger.hold(order)
    first = pack.apply_async((order,), queue=FIRST_QUEUE)
    ledger.wait_for_run(order)
    execution_id.freeze()
    shop.start_worker(concurrency=1)
    duplicate = pack.delay(order)
    winner = ledger.wait_for_run(order, number=2)
    # Both are held now. Only the one that was frozen has to stop.
    execution_id.thaw()
    eventually(lambda: ledger.runs(order)[0].end, "the thawed execution stops")
    ledger.release(order)
    receipts = first.get(timeout=SOON), duplicate.get(timeout=SOON)
    shop.wait_until_empty()
    return Thawed(
        frozen=ledger.runs(order)[0],
        winner=winner,
        receipts=receipts,
        signals_of_frozen=ledger.signals(first.id),
        notes=[],
    )


class TestRedeliveredWhileItRuns:
    """The broker takes the worker for dead after 3 s, and hands the message out again."""

    @pytest.mark.slow
    def test_runs_once_and_keeps_its_result(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(broker_transport_options=SOON_VISIBLE) as shop:
            shop.start_worker(concurrency=2)
            shop.ledger.hold(order)
            result = pack.delay(order)
            run = shop.ledger.wait_for_run(order)
            shop.ledger.wait_for_signal(result.id, "conflicted", number=2)
            eventually(lambda: time.time() > run.started_at + 8, "8 s are over")
            assert result.state == "PENDING", "no copy has written a state"
            shop.ledger.release(order)

            receipt = result.get(timeout=SOON)
            shop.wait_until_empty()
            assert result.state == "SUCCESS"
            assert shop.app.AsyncResult(result.id).get(timeout=SOON) == receipt
            assert [run.end for run in shop.ledger.runs(order)] == ["returned"]

    @pytest.mark.slow
    def test_its_copies_do_not_multiply(self, open_shop: Callable[..., Shop], order: str) -> None:
        with open_shop(broker_transport_options={**SOON_VISIBLE, "visibility_timeout": 1}) as shop:
            shop.start_worker(concurrency=2)
            shop.ledger.hold(order)
            result = pack.delay(order)
            shop.ledger.wait_for_signal(result.id, "conflicted", number=6)
            messages = shop.messages()
            shop.ledger.release(order)
            result.get(timeout=SOON)

            # The one that runs and the one that comes back, which may be on its way.
            assert messages <= 3

    @pytest.mark.slow
    def test_a_copy_runs_when_the_first_one_dies(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(
            broker_transport_options=SOON_VISIBLE,
            idempotency_lease=LEASE,
            # Says what becomes of duplicates. A copy of the message that runs is none.
            idempotency_on_conflict="ignore",
        ) as shop:
            execution_id = shop.start_worker(concurrency=1)
            shop.start_worker(concurrency=1)
            shop.ledger.hold(order)
            result = pack.delay(order)
            run = shop.ledger.wait_for_run(order)
            shop.ledger.wait_for_signal(result.id, "conflicted")
            (execution_id,) = (worker for worker in shop.workers if run.pid in worker.children())
            execution_id.kill()
            shop.ledger.release(order)

            assert result.get(timeout=SOON)["receipt"]
            assert [run.end for run in shop.ledger.runs(order)] == [None, "returned"]
            shop.wait_until_empty()
