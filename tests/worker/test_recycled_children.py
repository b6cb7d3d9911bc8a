"""Pools that replace their processes by task count, memory or load."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from celery_idempotent import State
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.tasks import pack

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

ORDERS = 8


@pytest.mark.parametrize("option", ["--max-tasks-per-child", "--max-memory-per-child"])
def test_each_key_runs_once_if_processes_are_replaced_after_each_task(
    open_shop: Callable[..., Shop], order: str, option: str
) -> None:
    orders = [f"{order}-{number}" for number in range(ORDERS)]
    with open_shop() as shop:
        shop.start_worker(option, "1")
        results = {name: [pack.delay(name) for _ in range(2)] for name in orders}
        late = [pack.delay(name) for name in orders]

        for (name, copies), duplicate in zip(results.items(), late, strict=True):
            receipts = [copy.get(timeout=SOON) for copy in [*copies, duplicate]]
            assert receipts == [receipts[0]] * 3
            assert [run.end for run in shop.ledger.runs(name)] == ["returned"]
        pids = {shop.ledger.runs(name)[0].pid for name in orders}
        assert len(pids) == ORDERS, "each execution had its own process"
        shop.wait_until_empty()


def test_autoscaling_down_interrupts_no_execution(
    open_shop: Callable[..., Shop], order: str
) -> None:
    orders = [f"{order}-{number}" for number in range(3)]
    with open_shop() as shop:
        worker = shop.start_worker("--autoscale", "4,1", AUTOSCALE_KEEPALIVE="0.5")
        for name in orders:
            shop.ledger.hold(name)
        firsts = [pack.delay(name) for name in orders]
        pids = {shop.ledger.wait_for_run(name).pid for name in orders}
        duplicate = shop.ledger.duplicate(pack, orders[0])
        for name in orders[1:]:
            shop.ledger.release(name)
        # The pool shrinks while one task runs and its duplicate is requeued.
        eventually(lambda: len(pids & set(worker.children())) < len(pids), "the pool shrinks")
        kept = shop.ledger.runs(orders[0])[0].pid
        os.kill(kept, 0)
        shop.ledger.release(orders[0])

        receipts = [first.get(timeout=SOON) for first in firsts]
        assert duplicate.get(timeout=SOON) == receipts[0]
        assert [pack.delay(name).get(timeout=SOON) for name in orders] == receipts
        for name in orders:
            assert [run.end for run in shop.ledger.runs(name)] == ["returned"]
            assert pack.idempotency_record(name).state is State.COMPLETED
        shop.wait_until_empty()
