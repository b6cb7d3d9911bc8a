"""``self.idempotency.step``: steps run once per key, across all its executions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery.result import AsyncResult

from tests.waiting import SOON
from tests.worker.canvas_tasks import PARTS, ship
from tests.worker.harness import LEASE, FrozenTakeover, Shop, freeze_past_the_lease
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError

pytestmark = pytest.mark.worker

after_each_step = pytest.mark.parametrize("after", PARTS)


class TestWithoutFaults:
    def test_each_step_returns_its_value(self, ledger: Ledger, order: str) -> None:
        values = ship.delay(order).get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert ledger.notes(order) == list(PARTS)

    def test_duplicate_runs_no_steps(self, ledger: Ledger, order: str) -> None:
        values = ship.delay(order).get(timeout=SOON)

        assert ship.delay(order).get(timeout=SOON) == values
        assert ledger.notes(order) == list(PARTS)


class TestKilledAfterAStep:
    @pytest.fixture(scope="class")
    @classmethod
    def killed(cls, shared_shop: Shop) -> dict[str, AsyncResult]:
        """Published together, because the pool may need five seconds to detect a dead process."""
        shared_shop.app.set_current()
        return {part: ship.delay(f"killed after {part}", part, "killed") for part in PARTS}

    @after_each_step
    def test_each_step_runs_once(
        self, ledger: Ledger, killed: dict[str, AsyncResult], after: str
    ) -> None:
        killed[after].get(timeout=SOON)

        assert ledger.notes(f"killed after {after}") == list(PARTS)
        assert [run.attempt for run in ledger.runs(f"killed after {after}")] == [1, 2]

    @after_each_step
    def test_completed_steps_return_their_values(
        self, shop: Shop, killed: dict[str, AsyncResult], after: str
    ) -> None:
        values = killed[after].get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert len(set(values)) == 3


class TestErrorAfterAStep:
    @after_each_step
    def test_next_publish_does_not_run_it_again(
        self, ledger: Ledger, order: str, after: str
    ) -> None:
        with pytest.raises(OutOfStockError):
            ship.delay(order, after, "error").get(timeout=SOON)

        values = ship.delay(order, after, "error").get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert ledger.notes(order) == list(PARTS)
        assert [run.end for run in ledger.runs(order)] == ["OutOfStockError", "returned"]

    def test_counts_no_attempt(self, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            ship.delay(order, "book", "error").get(timeout=SOON, propagate=False)

        assert [run.attempt for run in ledger.runs(order)] == [1, 1]


class TestRetryAfterAStep:
    @after_each_step
    def test_does_not_run_it_again(self, ledger: Ledger, order: str, after: str) -> None:
        values = ship.delay(order, after, "retry").get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert ledger.notes(order) == list(PARTS)
        assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]


class TestFrozenBetweenSteps:
    @pytest.fixture(scope="class")
    @classmethod
    def takeover(cls, open_shop: Callable[..., Shop]) -> Iterator[FrozenTakeover]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, ship, "frozen")

    def test_stale_execution_runs_no_step(self, takeover: FrozenTakeover) -> None:
        assert takeover.frozen.end == "LeaseLostError"
        assert takeover.notes == list(PARTS)

    def test_both_callers_get_the_same_values(self, takeover: FrozenTakeover) -> None:
        assert takeover.receipts[0] == takeover.receipts[1]


@pytest.mark.exhaustive
class TestFrozenWithinAStep:
    @pytest.fixture(scope="class")
    @classmethod
    def takeover(cls, open_shop: Callable[..., Shop]) -> Iterator[FrozenTakeover]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, ship, "frozen", within="book")

    def test_step_of_the_stale_execution_is_rejected(self, takeover: FrozenTakeover) -> None:
        assert takeover.frozen.end == "LeaseLostError"
        assert takeover.winner.end == "returned"

    def test_only_the_interrupted_step_runs_twice(self, takeover: FrozenTakeover) -> None:
        assert takeover.notes == ["charge", "book", "book", "mail"]

    def test_both_callers_get_the_same_values(self, takeover: FrozenTakeover) -> None:
        assert takeover.receipts[0] == takeover.receipts[1]
