"""A call in shadow is held up by nothing: Redis is away, frozen or does not reply."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import pack, reserved

#: Seconds that a call may take, a loaded machine included. Without shadow, one command alone takes
#: up to five seconds.
AT_ONCE = 4.0

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def proxy(store: RedisServer) -> Iterator[Proxy]:
    with Proxy(store.url) as proxy:
        yield proxy


@pytest.fixture(scope="module", params=["prefork", "threads"])
def shared_shop(open_shop: OpenShop, proxy: Proxy, request: Any) -> Iterator[Shop]:
    with open_shop(idempotency_shadow=True, idempotency_redis_url=proxy.url) as shop:
        proxy.refuse()  # a worker starts without Redis
        shop.start_worker("--pool", request.param, concurrency=2)
        proxy.heal()
        yield shop


@pytest.fixture(autouse=True)
def heals(shop: Shop, ledger: Ledger, proxy: Proxy) -> Iterator[None]:
    """After the outage, calls are counted again: the breaker closes by itself."""
    yield
    proxy.heal()

    def counted() -> bool:
        results = [pack.delay(f"{time.time()}-{number}") for number in range(4)]
        for result in results:
            result.get(timeout=SOON)
        found = {received.name for r in results for received in ledger.signals(r.id)}
        return found == {"would_run"}

    eventually(counted, "calls are counted")


OUTAGES = {"refused": lambda proxy: proxy.refuse(), "silent": lambda proxy: proxy.black_hole()}


@pytest.mark.parametrize("outage", OUTAGES)
def test_calls_run_and_are_not_counted(shop: Shop, proxy: Proxy, order: str, outage: str) -> None:
    shop.workers[0].new_logs()
    OUTAGES[outage](proxy)
    results = [pack.delay(f"{order}-{number}") for number in range(10)]
    started_at = time.monotonic()
    for number, result in enumerate(results):
        assert result.get(timeout=SOON)["receipt"]
        assert len(shop.ledger.runs(f"{order}-{number}")) == 1
    assert time.monotonic() - started_at < AT_ONCE

    received = [received for result in results for received in shop.ledger.signals(result.id)]
    assert [one.name for one in received] == ["store_unavailable"] * 10
    assert {one.details["policy"] for one in received} == {"shadow"}
    # Two processes, or two threads that send at the same time: the others do not wait for Redis.
    waited = [one for one in received if "the next attempt" not in one.details["error"][1]]
    assert len(waited) <= 4
    errors = re.findall("ERROR.* shadow counting failed", shop.workers[0].new_logs())
    assert 1 <= len(errors) <= 2, "one for each process"


@pytest.mark.parametrize("outage", OUTAGES)
def test_at_the_end_nothing_changes(ledger: Ledger, proxy: Proxy, order: str, outage: str) -> None:
    result = ledger.start(pack, order)
    OUTAGES[outage](proxy)
    started_at = time.monotonic()
    ledger.release(order)

    assert result.get(timeout=SOON)["receipt"]
    assert time.monotonic() - started_at < AT_ONCE
    assert [received.name for received in ledger.signals(result.id)] == ["would_run"]


def test_publisher_does_not_wait(ledger: Ledger, proxy: Proxy, order: str) -> None:
    proxy.black_hole()
    started_at = time.monotonic()
    first, second = reserved.delay(order), reserved.delay(order)
    assert time.monotonic() - started_at < AT_ONCE

    assert first.id != second.id
    assert first.get(timeout=SOON) != second.get(timeout=SOON)
    assert len(ledger.runs(order)) == 2
