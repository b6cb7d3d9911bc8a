"""``self.idempotency.step``: steps run once per key, across all its executions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from tests.waiting import SOON
from tests.worker.canvas_tasks import PARTS, ship
from tests.worker.harness import LEASE, Shop, freeze_past_the_lease
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError

pytestmark = pytest.mark.worker

after_each_step = pytest.mark.parametrize("after", PARTS)


def test_each_step_returns_its_value_and_a_duplicate_runs_none(ledger: Ledger, order: str) -> None:
    values = ship.delay(order).get(timeout=SOON)

    assert [value.split()[0] for value in values] == list(PARTS)
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
    def test_completed_steps_return_their_values(
        self, ledger: Ledger, killed: dict[str, AsyncResult], after: str
    ) -> None:
        values = killed[after].get(timeout=SOON)
        assert [value.split()[0] for value in values] == list(PARTS)
        assert len(set(values)) == 3
        assert ledger.notes(f"killed after {after}") == list(PARTS)
        assert [run.attempt for run in ledger.runs(f"killed after {after}")] == [1, 2]


@after_each_step
def test_next_publish_after_an_error_does_not_run_it_again(
    ledger: Ledger, order: str, after: str
) -> None:
    with pytest.raises(OutOfStockError):
        ship.delay(order, after, "error").get(timeout=SOON)

    values = ship.delay(order, after, "error").get(timeout=SOON)
    assert [value.split()[0] for value in values] == list(PARTS)
    assert ledger.notes(order) == list(PARTS)
    runs = ledger.runs(order)
    assert [(run.end, run.attempt) for run in runs] == [("OutOfStockError", 1), ("returned", 1)]


@after_each_step
def test_retry_does_not_run_it_again(ledger: Ledger, order: str, after: str) -> None:
    values = ship.delay(order, after, "retry").get(timeout=SOON)

    assert [value.split()[0] for value in values] == list(PARTS)
    assert ledger.notes(order) == list(PARTS)
    assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]


@pytest.mark.parametrize(
    "within", ["", pytest.param("book", marks=pytest.mark.exhaustive)], ids=["between", "within"]
)
def test_stale_execution_completes_no_step(
    open_shop: Callable[..., Shop], order: str, within: str
) -> None:
    """It was frozen before its first step or within a step, which then runs twice."""
    with open_shop(idempotency_lease=LEASE) as shop:
        takeover = freeze_past_the_lease(shop, ship, order, within)

    assert (takeover.frozen.end, takeover.winner.end) == ("LeaseLostError", "returned")
    assert sorted(takeover.notes) == sorted([*PARTS, *([within] if within else [])])
    assert takeover.receipts[0] == takeover.receipts[1]
