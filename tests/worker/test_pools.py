"""The basic promises with each of Celery's pools."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from celery_idempotent import State
from tests.apps import run_command
from tests.waiting import SOON, eventually
from tests.worker.harness import BYPASSED, OpenShop, Shop, check_duplicates
from tests.worker.ledger import Ledger
from tests.worker.tasks import catching, give, pack, running, short_lease, short_turn, try_later

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")


def _in_a_group_of_its_own(pool: str) -> Any:
    marks = [pytest.mark.xdist_group(f"pool {pool}")]
    if pool != "threads":  # the other modules use prefork
        marks.append(pytest.mark.exhaustive)
    return pytest.param(pool, marks=marks)


@pytest.fixture(scope="module", params=map(_in_a_group_of_its_own, POOLS))
def pool(request: pytest.FixtureRequest) -> str:
    pool: str = request.param
    if pool in ("gevent", "eventlet") and find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    return pool


@pytest.fixture(scope="module")
def shared_shop(pool: str, open_shop: OpenShop) -> Iterator[Shop]:
    with open_shop() as shop:
        shop.start_worker("--pool", pool, concurrency=30 if pool in ("gevent", "eventlet") else 4)
        yield shop


@pytest.mark.exhaustive
@pytest.mark.core
def test_twenty_duplicates_cause_no_execution(shop: Shop, order: str, pool: str) -> None:
    # Solo takes one message at a time.
    check_duplicates(shop, pack, order, 20, at_once=pool != "solo")
    duplicate = pack.delay(order)
    assert duplicate.get(timeout=SOON)
    shop.ledger.wait_for_signal(duplicate.id, "replayed")


@pytest.mark.core
@pytest.mark.parametrize("task", [catching, running])
def test_catching_call_ends_no_duplicate(shop: Shop, order: str, pool: str, task: Any) -> None:
    assert check_duplicates(shop, task, order, 1, at_once=pool != "solo")["value"]["receipt"]


@pytest.mark.core
def test_retry_has_no_conflict(ledger: Ledger, order: str) -> None:
    result = try_later.delay(order, 1.0)

    assert result.get(timeout=SOON)
    assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]
    assert ledger.signals(result.id, "conflicted") == []


@pytest.mark.exhaustive
def test_execution_longer_than_its_lease_keeps_it(ledger: Ledger, order: str) -> None:
    first = ledger.start(short_lease, order)
    run = ledger.wait_for_run(order)
    eventually(lambda: time.time() > run.started_at + 2.5, "a lease of 2 s would be over")
    duplicate = short_lease.delay(order)
    ledger.release(order)

    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
    assert len(ledger.runs(order)) == 1
    assert ledger.signals(first.id, "lease_lost") == []


@pytest.mark.parametrize("task", [short_lease, short_turn])
def test_a_running_call_shows_where_it_is(shop: Shop, order: str, pool: str, task: Any) -> None:
    result = shop.ledger.start(task, order)
    key = str(task.idempotency_key_of(order))

    def stack() -> list[str]:
        document = json.loads(run_command(shop.app, "show", key, "--json"))
        return [line.rpartition("/")[2] for line in document.get("stack", ())]

    if pool == "solo":  # the thread that would reply runs the call
        assert "No worker replied" in run_command(shop.app, "show", key)
    else:
        lines: list[str] = eventually(stack, "the worker knows the stack")
        assert re.fullmatch(r"tasks\.py:\d+ handle", lines[0])
        assert any(re.fullmatch(r"ledger\.py:\d+ wait_for_release", line) for line in lines)
    shop.ledger.release(order)
    result.get(timeout=SOON)
    assert stack() == []


@pytest.mark.core
def test_messages_that_end_without_a_decision_are_an_error(open_shop: OpenShop) -> None:
    with open_shop() as shop:
        shop.bypasses = True
        pool = "tests.worker.bypassing:Pool"
        worker = shop.start_worker("--pool", "custom", CELERY_CUSTOM_WORKER_POOL=pool)
        for _ in range(3):
            give.delay("order", 1)
        shop.wait_until_empty()

        findings = json.loads(run_command(shop.app, "health", "--json", code=1))["findings"]

        (finding,) = (each for each in findings if each["name"] == "bypassed")
        assert finding["subject"] == "shop.give"
        assert finding["what"].startswith("3 of its messages")
        assert worker.logs().count(BYPASSED) == 1
        assert "the pool tests.worker.bypassing.Pool is not one of Celery's" in worker.logs()


ORDERS = 8


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--max-tasks-per-child", "--max-memory-per-child"])
def test_each_key_runs_once_in_new_processes(open_shop: OpenShop, order: str, option: str) -> None:
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_autoscaling_down_interrupts_no_execution(open_shop: OpenShop, order: str) -> None:
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
