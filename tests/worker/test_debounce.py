"""Quiet times: a call begins when no publish came for a while, or after the longest wait."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from itertools import count

import pytest
from celery.result import AsyncResult

from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import KILLED_WORKERS, OpenShop, Shop
from tests.worker.tasks import LONGEST_QUIET, QUIET, debounced

SHOP = {"idempotency_lease": 4.0}


def test_it_begins_after_the_last_publish(shop: Shop, order: str) -> None:
    results = []
    for amount in range(4):
        results.append(debounced.delay(order, amount))
        published_at = time.time()
        time.sleep(QUIET / 3)

    assert len({result.id for result in results}) == 1
    assert results[0].get(timeout=SOON)["amount"] == 3
    (run,) = shop.ledger.runs(order)
    assert run.started_at - published_at >= QUIET - 0.1


def test_it_begins_after_the_longest_wait(shop: Shop, order: str) -> None:
    began_at, first, last = time.time(), debounced.delay(order, 0), 0
    for amount in count(1):
        if shop.ledger.runs(order):
            break
        if debounced.delay(order, amount).id == first.id:
            last = amount
        time.sleep(QUIET / 5)

    run = shop.ledger.runs(order)[0]
    assert LONGEST_QUIET - 0.1 <= run.started_at - began_at < LONGEST_QUIET + SOON
    assert first.get(timeout=SOON)["amount"] == last


@pytest.mark.parametrize("kind", ["countdown", "eta"])
def test_a_later_eta_counts(shop: Shop, order: str, kind: str) -> None:
    seconds = 2 * QUIET
    eta = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    options = {"eta": eta} if kind == "eta" else {"countdown": seconds}
    debounced.delay(order, 1)
    last: AsyncResult = debounced.apply_async((order, 2), **options)

    assert last.get(timeout=SOON)["amount"] == 2
    (run,) = shop.ledger.runs(order)
    assert run.started_at >= eta.timestamp() - 0.1


@pytest.mark.exhaustive
def test_restarts_change_nothing(open_shop: OpenShop, store: RedisServer, order: str) -> None:
    settings = {**KILLED_WORKERS, "idempotency_redeliver_after": None}
    with open_shop(idempotency_redis_url=store.url, **settings) as shop:
        worker = shop.start_worker(concurrency=1)
        debounced.delay(order, 1)
        last = debounced.delay(order, 2)
        published_at = time.time()
        worker.kill()
        store.kill()
        store.restart()
        shop.start_worker(concurrency=1)

        assert last.get(timeout=SOON)["amount"] == 2
        (run,) = shop.ledger.runs(order)
        assert run.started_at - published_at >= QUIET - 0.1
