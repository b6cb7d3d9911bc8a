"""Takeover of executions that are killed or frozen; all callers get one outcome."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.waiting import SOON
from tests.worker.harness import FAST_REDELIVERY, LEASE, Shop, freeze_past_the_lease
from tests.worker.ledger import Ledger
from tests.worker.tasks import pack


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
def test_frozen_execution_loses_its_lease_to_another(
    open_shop: Callable[..., Shop], order: str
) -> None:
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
def test_redelivered_copies_do_not_multiply(open_shop: Callable[..., Shop], order: str) -> None:
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
