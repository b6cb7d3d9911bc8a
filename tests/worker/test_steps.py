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


def test_each_step_returns_its_value_and_a_duplicate_runs_none(ledger: Ledger, order: str) -> None:
    values = ship.delay(order).get(timeout=SOON)

    assert [value.split()[0] for value in values] == list(PARTS)
    assert ship.delay(order).get(timeout=SOON) == values
    assert ledger.notes(order) == list(PARTS)


#: How the first execution ends after a step, and the attempt of the second.
WAYS = {"killed": (None, 2), "error": ("OutOfStockError", 1), "retry": ("Retry", 1)}
CASES = [(way, part) for way in WAYS for part in PARTS]


@pytest.fixture(scope="module")
def interrupted(shared_shop: Shop) -> dict[tuple[str, str], AsyncResult]:
    """Published together, because the pool may need five seconds to detect a dead process."""
    shared_shop.app.set_current()
    return {(way, part): ship.delay(f"{way} after {part}", part, way) for way, part in CASES}


@pytest.mark.parametrize(("way", "after"), CASES)
def test_the_next_execution_does_not_run_finished_steps(
    ledger: Ledger, interrupted: dict[tuple[str, str], AsyncResult], way: str, after: str
) -> None:
    result, order = interrupted[way, after], f"{way} after {after}"
    if way == "error":
        with pytest.raises(OutOfStockError):
            result.get(timeout=SOON)
        result = ship.delay(order, after, way)

    values = result.get(timeout=SOON)
    assert [value.split()[0] for value in values] == list(PARTS)
    assert len(set(values)) == 3
    assert ledger.notes(order) == list(PARTS)
    end, attempt = WAYS[way]
    runs = ledger.runs(order)
    assert [(run.end, run.attempt) for run in runs] == [(end, 1), ("returned", attempt)]


@pytest.mark.parametrize("within", ["", pytest.param("book", marks=pytest.mark.exhaustive)])
def test_stale_execution_completes_no_step(
    open_shop: Callable[..., Shop], order: str, within: str
) -> None:
    """It was frozen before its first step or within a step, which then runs twice."""
    with open_shop(idempotency_lease=LEASE) as shop:
        frozen, winner, _ = freeze_past_the_lease(shop, ship, order, within)

        assert (frozen.end, winner.end) == ("LeaseLostError", "returned")
        assert sorted(shop.ledger.notes(order)) == sorted([*PARTS, *([within] if within else [])])
