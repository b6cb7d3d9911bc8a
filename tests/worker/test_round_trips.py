"""What the gate costs, counted by the server that pays for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from celery_idempotent.testing.server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.shop import PARTS, flaky, pack, ship

pytestmark = pytest.mark.worker


class Meter:
    """Counts the scripts that a server ran for a call."""

    def __init__(self, shop: Shop, client: Redis) -> None:
        self.shop = shop
        self._client = client

    def round_trips(self, order: str, task: Any = pack) -> int:
        """How many scripts ran for one call that waits for its result."""
        self._client.config_resetstat()
        task.delay(order).get(timeout=SOON, propagate=False)
        stats = self._client.info("commandstats")
        return sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_eval"))


@pytest.fixture(scope="module")
def meter(open_shop: Callable[..., Shop]) -> Iterator[Meter]:
    with (
        # Of its own, because results and ledger would be counted too.
        RedisServer.start(config={"appendonly": "no"}) as store,
        open_shop(idempotency_redis_url=store.url) as shop,
    ):
        shop.start_worker(concurrency=1)
        # Connects, and makes the scripts known.
        for task in (pack, ship, flaky):
            task.delay("warm").get(timeout=SOON, propagate=False)
        yield Meter(shop, store.client())


def test_a_run_takes_two(meter: Meter, order: str) -> None:
    assert meter.round_trips(order) == 2


def test_a_replay_takes_one(meter: Meter, order: str) -> None:
    meter.round_trips(order)

    assert meter.round_trips(order) == 1
    assert len(meter.shop.ledger.runs(order)) == 1


def test_a_step_takes_one_more(meter: Meter, order: str) -> None:
    assert meter.round_trips(order, ship) == 2 + len(PARTS)


def test_a_replay_of_a_task_with_steps_takes_one(meter: Meter, order: str) -> None:
    meter.round_trips(order, ship)

    assert meter.round_trips(order, ship) == 1


def test_an_error_takes_no_more_than_a_run(meter: Meter, order: str) -> None:
    assert meter.round_trips(order, flaky) == 2
