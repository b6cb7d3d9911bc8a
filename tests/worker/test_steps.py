"""``self.idempotency.step``: parts of a task that run once for the key, whoever runs the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery.result import AsyncResult

from tests.waiting import SOON
from tests.worker.frozen import LEASE, Thawed, freeze_past_the_lease
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.shop import PARTS, OutOfStockError, ship

pytestmark = pytest.mark.worker

after_each_step = pytest.mark.parametrize("after", PARTS)


class TestNothingHappens:
    def test_each_step_runs_and_gives_its_value(self, ledger: Ledger, order: str) -> None:
        values = ship.delay(order).get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert ledger.notes(order) == list(PARTS)

    def test_a_duplicate_replays_without_steps(self, ledger: Ledger, order: str) -> None:
        values = ship.delay(order).get(timeout=SOON)

        assert ship.delay(order).get(timeout=SOON) == values
        assert ledger.notes(order) == list(PARTS)


class TestKilledAfterAStep:
    @pytest.fixture(scope="class")
    @classmethod
    def killed(cls, shared_shop: Shop) -> dict[str, AsyncResult]:
        """All at once: the pool may take five seconds to see that a child is gone."""
        shared_shop.app.set_current()
        return {part: ship.delay(f"killed after {part}", part, "killed") for part in PARTS}

    @after_each_step
    def test_each_part_happens_once(
        self, ledger: Ledger, killed: dict[str, AsyncResult], after: str
    ) -> None:
        killed[after].get(timeout=SOON)

        assert ledger.notes(f"killed after {after}") == list(PARTS)
        assert [run.attempt for run in ledger.runs(f"killed after {after}")] == [1, 2]

    @after_each_step
    def test_finished_steps_come_back_with_their_values(
        self, shop: Shop, killed: dict[str, AsyncResult], after: str
    ) -> None:
        values = killed[after].get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert len(set(values)) == 3


class TestAnErrorAfterAStep:
    @after_each_step
    def test_the_next_publish_does_not_run_it_again(
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


class TestARetryAfterAStep:
    @after_each_step
    def test_does_not_run_it_again(self, ledger: Ledger, order: str, after: str) -> None:
        values = ship.delay(order, after, "retry").get(timeout=SOON)

        assert [value.split()[0] for value in values] == list(PARTS)
        assert ledger.notes(order) == list(PARTS)
        assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]


class TestFrozenBetweenSteps:
    @pytest.fixture(scope="class")
    @classmethod
    def thawed(cls, open_shop: Callable[..., Shop]) -> Iterator[Thawed]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, ship, "frozen")

    def test_the_stale_owner_runs_no_step(self, thawed: Thawed) -> None:
        assert thawed.frozen.end == "LeaseLostError"
        assert thawed.notes == list(PARTS)

    def test_both_callers_get_the_winners_values(self, thawed: Thawed) -> None:
        assert thawed.receipts[0] == thawed.receipts[1]


class TestFrozenWithinAStep:
    @pytest.fixture(scope="class")
    @classmethod
    def thawed(cls, open_shop: Callable[..., Shop]) -> Iterator[Thawed]:
        with open_shop(idempotency_lease=LEASE) as shop:
            yield freeze_past_the_lease(shop, ship, "frozen", within="book")

    def test_the_stale_owners_step_is_refused(self, thawed: Thawed) -> None:
        assert thawed.frozen.end == "LeaseLostError"
        assert thawed.winner.end == "returned"

    def test_only_the_step_under_way_happens_twice(self, thawed: Thawed) -> None:
        assert thawed.notes == ["charge", "book", "book", "mail"]

    def test_both_callers_get_the_winners_values(self, thawed: Thawed) -> None:
        assert thawed.receipts[0] == thawed.receipts[1]
