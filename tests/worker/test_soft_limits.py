"""A soft time limit before or after the body is not the outcome of the task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.tasks import pack, waiting

pytestmark = pytest.mark.worker

RAISED = "SoftTimeLimitExceeded()"


@pytest.fixture
def store() -> Iterator[RedisServer]:
    with RedisServer.start(config={}) as store:
        yield store


@pytest.mark.exhaustive
def test_interrupts_a_begin_without_a_reply(
    open_shop: Callable[..., Shop], store: RedisServer, order: str
) -> None:
    with open_shop(idempotency_redis_url=store.url, idempotency_redis_timeout=60.0) as shop:
        worker = shop.start_worker(concurrency=1)
        store.pause()
        result = pack.apply_async((order,), soft_time_limit=1)
        worker.wait_for_log(f" s: {RAISED}")
        store.resume()

        assert result.get(timeout=SOON)["receipt"]
        assert [run.attempt for run in shop.ledger.runs(order)] == [1]


@pytest.mark.parametrize("given", ["with the message", "to the worker"])
@pytest.mark.exhaustive
def test_waiting_duplicate_is_requeued(
    open_shop: Callable[..., Shop], order: str, given: str
) -> None:
    with open_shop(idempotency_wait_timeout=60.0) as shop:
        options = ("--soft-time-limit", "1") if given == "to the worker" else ()
        worker = shop.start_worker(*options, concurrency=1)
        shop.start_worker("--queues", "holder", concurrency=1)
        shop.ledger.hold(order)
        first = waiting.apply_async((order,), queue="holder")
        shop.ledger.wait_for_run(order)
        limits = {"soft_time_limit": 1} if given == "with the message" else {}
        duplicate = waiting.apply_async((order,), **limits)

        if given == "with the message":  # then the wait is limited to half of it
            shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=2)
            assert RAISED not in worker.logs()
        else:
            worker.wait_for_log(f" s: {RAISED}")
        shop.ledger.release(order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(shop.ledger.runs(order)) == 1
