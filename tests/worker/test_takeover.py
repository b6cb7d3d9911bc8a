"""Takeover of executions that are killed or frozen; all callers get one outcome."""

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
from tests.worker.harness import (
    COPIED_MESSAGES,
    FAST_REDELIVERY,
    KILLED_WORKERS,
    LEASE,
    FrozenTakeover,
    Shop,
    freeze_past_the_lease,
)
from tests.worker.ledger import Ledger, Run
from tests.worker.tasks import check_then_handle, pack, poison

pytestmark = pytest.mark.worker


@dataclass(frozen=True)
class Recovered:
    """An execution whose process was killed, and the one that took over."""

    result: AsyncResult
    killed: Run
    killed_at: float
    second: Run
    was_in_pool: bool


@pytest.mark.core
class TestPoolProcessKilled:
    """The worker's main process detects the death and abandons the lease."""

    ORDER = "order of a killed pool process"

    @pytest.fixture(scope="class")
    @classmethod
    def recovered(cls, shared_shop: Shop) -> Recovered:
        shared_shop.app.set_current()
        ledger = shared_shop.ledger
        ledger.hold(cls.ORDER)
        result = pack.delay(cls.ORDER)
        killed = ledger.wait_for_run(cls.ORDER)
        was_in_pool = killed.pid in shared_shop.workers[0].children()
        os.kill(killed.pid, signal.SIGKILL)
        killed_at = time.time()
        ledger.release(cls.ORDER)
        result.get(timeout=SOON)
        _, second = ledger.runs(cls.ORDER)
        return Recovered(result, killed, killed_at, second, was_in_pool)

    def test_task_runs_again_before_the_lease_ends(self, recovered: Recovered) -> None:
        assert recovered.was_in_pool
        assert recovered.second.started_at - recovered.killed_at < 15, "the lease is 60 s"

    def test_second_execution_is_recovered(self, recovered: Recovered) -> None:
        killed, second = recovered.killed, recovered.second
        assert (killed.attempt, killed.recovered) == (1, False)
        assert (second.attempt, second.recovered) == (2, True)
        assert second.task_id == killed.task_id
        assert second.token > killed.token

    def test_sends_taken_over(self, ledger: Ledger, recovered: Recovered) -> None:
        task_id, second = recovered.result.id, recovered.second
        ledger.wait_for_signal(task_id, "completed")  # its result is there before
        names = [received.name for received in ledger.signals(task_id)]
        assert names == ["begun", "begun", "taken_over", "completed"]
        (received,) = ledger.signals(task_id, "taken_over")
        assert received.sender == "shop.pack"
        assert 0 <= received.details.pop("orphaned_seconds") < SOON
        assert received.details == {
            "task_id": task_id,
            "key": second.key,
            "label": "",
            "token": second.token,
            "attempt": 2,
        }

    def test_completes_once(self, ledger: Ledger, recovered: Recovered) -> None:
        assert pack.delay(self.ORDER).get(timeout=SOON) == recovered.result.get(timeout=SOON)
        ledger.wait_for_signal(recovered.result.id, "completed")
        assert [run.end for run in ledger.runs(self.ORDER)] == [None, "returned"]
        assert len(ledger.signals(recovered.result.id, "completed")) == 1


class TestWorkerKilled:
    """The lease expires, and the broker redelivers the message."""

    def test_another_worker_takes_over(self, open_shop: Callable[..., Shop], order: str) -> None:
        with open_shop(**KILLED_WORKERS, idempotency_lease=LEASE) as shop:
            first = shop.start_worker(concurrency=1)
            shop.ledger.hold(order)
            result = pack.delay(order)
            killed = shop.ledger.wait_for_run(order)
            shop.start_worker(concurrency=1)
            first.kill()
            shop.ledger.release(order)

            assert result.get(timeout=SOON)["receipt"]
            second = shop.ledger.runs(order)[1]
            assert (second.task_id, second.attempt, second.recovered) == (result.id, 2, True)
            assert second.token > killed.token
            assert [run.end for run in shop.ledger.runs(order)] == [None, "returned"]
            shop.wait_until_empty()

    @pytest.mark.exhaustive
    def test_duplicate_takes_over_before_the_redelivery(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        # kombu's default visibility timeout is an hour.
        with open_shop(idempotency_lease=LEASE) as shop:
            first = shop.start_worker(concurrency=1)
            shop.ledger.start(pack, order)
            shop.start_worker(concurrency=1)
            first.kill()
            shop.ledger.release(order)
            duplicate = pack.delay(order)

            assert duplicate.get(timeout=SOON)["receipt"]
            killed, second = shop.ledger.runs(order)
            assert (second.task_id, second.attempt, second.recovered) == (duplicate.id, 2, True)
            assert second.started_at - killed.started_at >= LEASE


class TestTaskThatKillsItsWorker:
    """``idempotency_max_attempts``, here 2."""

    @pytest.fixture(scope="class")
    @classmethod
    def poisoned(cls, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
        with open_shop() as shop:
            shop.start_worker(concurrency=1)
            poison.apply_async(("poisonous",), task_id="poison").get(timeout=SOON, propagate=False)
            yield shop

    def test_runs_max_attempts_times(self, poisoned: Shop) -> None:
        runs = poisoned.ledger.runs("poisonous")

        assert [run.attempt for run in runs] == [1, 2]
        assert [run.end for run in runs] == [None] * 2

    def test_fails_as_poisoned(self, poisoned: Shop) -> None:
        with pytest.raises(PoisonedTaskError, match="has begun 2 times"):
            poisoned.app.AsyncResult("poison").get(timeout=SOON)
        assert poison.idempotency_record("poisonous").state is State.FAILED

    def test_leaves_no_message(self, poisoned: Shop) -> None:
        poisoned.wait_until_empty()

    def test_duplicates_get_the_same_error(self, poisoned: Shop) -> None:
        with pytest.raises(PoisonedTaskError, match="has begun 2 times"):
            poison.delay("poisonous").get(timeout=SOON)
        assert len(poisoned.ledger.runs("poisonous")) == 2


class TestOwnerFrozen:
    """SIGSTOP, which resembles a swapping or paused machine."""

    @pytest.fixture(scope="class")
    @classmethod
    def takeover(cls, open_shop: Callable[..., Shop]) -> Iterator[FrozenTakeover]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, pack, "frozen")

    def test_another_execution_takes_over(self, takeover: FrozenTakeover) -> None:
        assert (takeover.winner.attempt, takeover.winner.recovered) == (2, True)
        assert takeover.winner.started_at - takeover.frozen.started_at >= LEASE

    def test_second_token_is_higher(self, takeover: FrozenTakeover) -> None:
        assert takeover.winner.token > takeover.frozen.token

    def test_both_callers_get_the_same_result(self, takeover: FrozenTakeover) -> None:
        assert takeover.receipts[0] == takeover.receipts[1]

    def test_late_completion_is_rejected(self, takeover: FrozenTakeover) -> None:
        assert takeover.frozen.end == "returned"
        names = [signal.name for signal in takeover.signals_of_frozen]
        assert "completed" not in names
        # The thread of the heartbeat may report the lost lease later.
        assert "replayed" in names

    def test_sends_lease_lost_once(self, takeover: FrozenTakeover) -> None:
        (received,) = (s for s in takeover.signals_of_frozen if s.name == "lease_lost")
        assert received.sender == "shop.pack"
        assert received.details == {
            "task_id": takeover.frozen.task_id,
            "key": takeover.frozen.key,
            "label": "",
            "token": takeover.frozen.token,
            "attempt": 1,
        }


@pytest.mark.exhaustive
class TestCheckAfterALostLease:
    @pytest.fixture(scope="class")
    @classmethod
    def takeover(cls, open_shop: Callable[..., Shop]) -> Iterator[FrozenTakeover]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, check_then_handle, "frozen")

    def test_raises(self, takeover: FrozenTakeover) -> None:
        # The winner has written its note first.
        assert takeover.notes[0] == "has its lease"
        assert takeover.frozen.key in takeover.notes[1]


@pytest.mark.exhaustive
class TestRedeliveredWhileItRuns:
    """The broker redelivers the message after 3 s."""

    @pytest.mark.slow
    def test_runs_once_and_keeps_its_result(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(**COPIED_MESSAGES) as shop:
            shop.start_worker(concurrency=2)
            shop.ledger.hold(order)
            result = pack.delay(order)
            run = shop.ledger.wait_for_run(order)
            shop.ledger.wait_for_signal(result.id, "conflicted", number=2)
            eventually(lambda: time.time() > run.started_at + 8, "8 s are over")
            assert result.state == "PENDING", "no copy has stored a state"
            shop.ledger.release(order)

            receipt = result.get(timeout=SOON)
            shop.wait_until_empty()
            assert result.state == "SUCCESS"
            assert shop.app.AsyncResult(result.id).get(timeout=SOON) == receipt
            assert [run.end for run in shop.ledger.runs(order)] == ["returned"]

    @pytest.mark.slow
    def test_copies_do_not_multiply(self, open_shop: Callable[..., Shop], order: str) -> None:
        with open_shop(
            broker_transport_options={**FAST_REDELIVERY, "visibility_timeout": 1},
            idempotency_redeliver_after=None,
        ) as shop:
            shop.start_worker(concurrency=2)
            shop.ledger.hold(order)
            result = pack.delay(order)
            shop.ledger.wait_for_signal(result.id, "conflicted", number=6)
            messages = shop.messages()
            shop.ledger.release(order)
            result.get(timeout=SOON)

            # The running message and the requeued one, which may exist twice for a moment.
            assert messages <= 3

    @pytest.mark.slow
    def test_copy_runs_when_the_first_execution_dies(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(
            **{**KILLED_WORKERS, **COPIED_MESSAGES},
            idempotency_lease=LEASE,
            # Applies to duplicates; a copy of the running message is not a duplicate.
            idempotency_on_conflict="ignore",
        ) as shop:
            for _ in range(2):
                shop.start_worker(concurrency=1)
            shop.ledger.hold(order)
            result = pack.delay(order)
            run = shop.ledger.wait_for_run(order)
            shop.ledger.wait_for_signal(result.id, "conflicted")
            (owner,) = (worker for worker in shop.workers if run.pid in worker.children())
            owner.kill()
            shop.ledger.release(order)

            assert result.get(timeout=SOON)["receipt"]
            assert [run.end for run in shop.ledger.runs(order)] == [None, "returned"]
            shop.wait_until_empty()
