"""Redis is unavailable, empty, or replaced: the row alone keeps effects and outcomes once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from celery.result import AsyncResult

from tests.servers.groups import SentinelServers
from tests.servers.program import wait_until
from tests.servers.redis_server import RedisServer
from tests.sql.harness import Shop, StartShop
from tests.waiting import SOON, eventually

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker, pytest.mark.postgresql]

#: In seconds.
LEASE = 2.0
DUPLICATES = 3
SETTINGS = {"idempotency_on_store_error": "run", "idempotency_redis_timeout": 0.5}
#: The records survive a restart.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture(scope="module")
def shop_with(start_shop: StartShop) -> StartShop:
    """Starts the workers of a shop with the settings of its store."""
    options: dict[str, Any] = {"lease": LEASE, "concurrency": 2 + DUPLICATES, **SETTINGS}
    return partial(start_shop, "sqlalchemy", "postgresql", **options)


def charge_unprotected(shop: Shop, order: str) -> list[AsyncResult]:
    """Charges an order several times, and waits until each call goes on without its record."""
    calls = [shop.charge(order) for _ in range(DUPLICATES)]
    for call in calls:
        shop.wait_for_log(f"task {call.id} runs without protection")
    return calls


class TestUnavailable:
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls) -> Iterator[RedisServer]:
        with RedisServer.start(config=DURABLE) as store:
            yield store

    @pytest.fixture(scope="class")
    @classmethod
    def shop(cls, shop_with: StartShop, store: RedisServer) -> Iterator[Shop]:
        with shop_with(idempotency_redis_url=store.url) as shop:
            yield shop

    def test_for_all_calls(self, shop: Shop, store: RedisServer, order: str) -> None:
        store.kill()
        shop.hold(order)
        calls = charge_unprotected(shop, order)
        shop.release(order)

        shop.assert_charged_once(order, *calls)
        store.restart()
        shop.assert_charged_once(order)

    def test_for_longer_than_the_lease(self, shop: Shop, store: RedisServer, order: str) -> None:
        """And its record is still there afterwards, for others to take over."""
        first = shop.start(order)
        store.kill()
        killed_at = time.monotonic()
        calls = charge_unprotected(shop, order)
        eventually(lambda: time.monotonic() > killed_at + LEASE, "the lease has expired")
        store.restart()
        calls.append(shop.charge(order))
        shop.release(order)

        shop.assert_charged_once(order, first, *calls)

    def test_and_empty_afterwards(self, shop: Shop, store: RedisServer, order: str) -> None:
        first = shop.start(order)
        store.kill()
        calls = charge_unprotected(shop, order)
        store.restart()
        with store.client() as client:
            client.flushall()
        shop.release(order)

        shop.assert_charged_once(order, first, *calls)


def test_a_failover_to_an_empty_replica(shop_with: StartShop, order: str) -> None:
    with SentinelServers.start() as sentinels:
        store = {
            "idempotency_redis_url": sentinels.url,
            "idempotency_redis_options": {"master_name": sentinels.master_name},
        }
        with shop_with(**store) as shop:
            master, replica = sentinels.master, sentinels.replica
            # Paused first, so that it cannot connect again.
            replica.pause()
            with master.client() as client:
                client.client_kill_filter(_type="replica")
            ended, running = shop.charge(order), order[::-1]
            ended.get(timeout=SOON)
            first = shop.start(running)
            master.kill()
            replica.resume()
            wait_until(lambda: sentinels.master is replica, "the replica was not promoted")
            second = shop.charge(running)
            shop.release(running)

            shop.assert_charged_once(order, ended)
            shop.assert_charged_once(running, first, second)
