"""Round trips per call, counted by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.canvas_tasks import PARTS, ship
from tests.worker.failing_tasks import flaky
from tests.worker.harness import Shop
from tests.worker.tasks import pack

pytestmark = pytest.mark.worker


class Meter:
    """Counts the scripts that a server ran for a call."""

    def __init__(self, shop: Shop, client: Redis) -> None:
        self.shop = shop
        self._client = client

    def round_trips(self, order: str, task: Any = pack) -> int:
        """Calls a task, waits for its result, and returns the number of executed scripts."""
        self._client.config_resetstat()
        task.delay(order).get(timeout=SOON, propagate=False)
        stats = self._client.info("commandstats")
        return sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_eval"))


@pytest.fixture(scope="module")
def meter(open_shop: Callable[..., Shop]) -> Iterator[Meter]:
    with (
        # A separate server, because results and ledger would be counted, too.
        RedisServer.start(config={"appendonly": "no"}) as store,
        open_shop(idempotency_redis_url=store.url) as shop,
    ):
        shop.start_worker(concurrency=1)
        # Connects and loads the scripts.
        for task in (pack, ship, flaky):
            task.delay("warm-up").get(timeout=SOON, propagate=False)
        yield Meter(shop, store.client())


def test_execution_takes_two(meter: Meter, order: str) -> None:
    assert meter.round_trips(order) == 2


def test_replay_takes_one(meter: Meter, order: str) -> None:
    meter.round_trips(order)

    assert meter.round_trips(order) == 1
    assert len(meter.shop.ledger.runs(order)) == 1


def test_each_step_takes_one_more(meter: Meter, order: str) -> None:
    assert meter.round_trips(order, ship) == 2 + len(PARTS)


def test_replay_with_steps_takes_one(meter: Meter, order: str) -> None:
    meter.round_trips(order, ship)

    assert meter.round_trips(order, ship) == 1


def test_error_takes_two(meter: Meter, order: str) -> None:
    assert meter.round_trips(order, flaky) == 2
