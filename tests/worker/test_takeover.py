"""Takeover of executions that are killed or frozen: all callers get one outcome, and
``self.idempotency.step`` runs each step once per key, across all its executions.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from celery.result import AsyncResult

from tests.waiting import SOON
from tests.worker.canvas_tasks import PARTS, ship
from tests.worker.harness import FAST_REDELIVERY, LEASE, OpenShop, Shop, freeze_past_the_lease
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError, pack


@pytest.mark.core
def test_pool_process_is_killed(shop: Shop, ledger: Ledger, order: str) -> None:
    """The worker's main process detects the death and abandons the lease."""
    result = ledger.start(pack, order)
    killed = ledger.wait_for_run(order)
    assert killed.pid in shop.workers[0].children()
    os.kill(killed.pid, signal.SIGKILL)
    killed_at = time.time()
    ledger.release(order)
    receipt = result.get(timeout=SOON)

    second = ledger.runs(order)[1]
    assert second.started_at - killed_at < 15, "the lease is 60 s"
    assert (killed.attempt, killed.recovered) == (1, False)
    assert (second.attempt, second.recovered) == (2, True)
    assert second.task_id == killed.task_id
    assert second.token > killed.token
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert [run.end for run in ledger.runs(order)] == [None, "returned"]
    ledger.wait_for_signal(result.id, "completed")  # its result is there before
    names = [received.name for received in ledger.signals(result.id)]
    assert names == ["begun", "begun", "taken_over", "completed"]
    (received,) = ledger.signals(result.id, "taken_over")
    assert received.sender == "shop.pack"
    assert 0 <= received.details.pop("orphaned_seconds") < SOON
    expected = {"task_id": result.id, "label": "", "attempt": 2}
    assert received.details == {**expected, "key": second.key, "token": second.token}


@pytest.mark.exhaustive
def test_frozen_execution_loses_its_lease_to_another(open_shop: OpenShop, order: str) -> None:
    """SIGSTOP, which resembles a swapping or paused machine."""
    with open_shop(idempotency_lease=LEASE) as shop:
        frozen, winner, signals = freeze_past_the_lease(shop, pack, order)

    assert winner.recovered
    assert winner.started_at - frozen.started_at >= LEASE
    assert winner.token > frozen.token
    assert frozen.end == "returned"
    names = [signal.name for signal in signals]
    assert "completed" not in names
    # The thread of the heartbeat may report the lost lease later.
    assert "replayed" in names
    (received,) = (s for s in signals if s.name == "lease_lost")
    assert received.sender == "shop.pack"
    expected = {"task_id": frozen.task_id, "label": "", "attempt": 1}
    assert received.details == {**expected, "key": frozen.key, "token": frozen.token}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_redelivered_copies_do_not_multiply(open_shop: OpenShop, order: str) -> None:
    options = {**FAST_REDELIVERY, "visibility_timeout": 1}
    with open_shop(broker_transport_options=options, idempotency_redeliver_after=None) as shop:
        shop.start_worker(concurrency=2)
        shop.ledger.hold(order)
        result = pack.delay(order)
        shop.ledger.wait_for_signal(result.id, "conflicted", number=6)
        messages = shop.messages()
        shop.ledger.release(order)
        result.get(timeout=SOON)

        # The running message and the requeued one, which may exist twice for a moment.
        assert messages <= 3


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
def test_stale_execution_completes_no_step(open_shop: OpenShop, order: str, within: str) -> None:
    """It was frozen before its first step or within a step, which then runs twice."""
    with open_shop(idempotency_lease=LEASE) as shop:
        frozen, winner, _ = freeze_past_the_lease(shop, ship, order, within)

        assert (frozen.end, winner.end) == ("LeaseLostError", "returned")
        assert sorted(shop.ledger.notes(order)) == sorted([*PARTS, *([within] if within else [])])
