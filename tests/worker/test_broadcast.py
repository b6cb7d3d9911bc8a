"""A message that every worker gets comes back once for each of them, and not to all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from kombu.common import Broadcast

from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON
from tests.worker.broadcasting import EVERYONE
from tests.worker.harness import Shop
from tests.worker.shop import pack, try_later

pytestmark = pytest.mark.worker

WORKERS = 2
_QUEUE = Broadcast(EVERYONE)
# On Redis a publisher has to know that the exchange is a fanout.
TO_EVERYONE = {"queue": _QUEUE, "declare": [_QUEUE.exchange]}


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def everyone(request: pytest.FixtureRequest, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with contextlib.ExitStack() as servers:
        broker = {}
        if request.param == "rabbitmq":
            broker["broker_url"] = servers.enter_context(RabbitMQ.start()).url
        shop = servers.enter_context(open_shop(imports=["tests.worker.broadcasting"], **broker))
        for _ in range(WORKERS):
            shop.start_worker(concurrency=2)
        yield shop


def received(shop: Shop, task_id: str) -> int:
    """How often any worker has been handed the message."""
    sign = f"[{task_id}] received"
    return sum(worker.logs().count(sign) for worker in shop.workers)


def test_a_copy_comes_back_once(everyone: Shop, order: str) -> None:
    everyone.app.set_current()
    everyone.ledger.hold(order)
    pack.delay(order)
    everyone.ledger.wait_for_run(order)
    pack.apply_async((order,), task_id=order, **TO_EVERYONE)

    # Each of its two copies comes back after 1, 2 and 4 seconds, so the fourth time within 7.
    everyone.ledger.wait_for_signal(order, "conflicted", 4 * WORKERS)
    everyone.ledger.release(order)

    assert pack.AsyncResult(order).get(timeout=SOON)["receipt"]
    everyone.ledger.wait_for_signal(order, "replayed", WORKERS)
    assert len(everyone.ledger.signals(order, "conflicted")) == 4 * WORKERS
    assert received(everyone, order) == 5 * WORKERS
    assert len(everyone.ledger.runs(order)) == 1


def test_a_retry_is_for_one(everyone: Shop, order: str) -> None:
    everyone.app.set_current()
    try_later.apply_async((order, 1), task_id=order, **TO_EVERYONE)

    assert try_later.AsyncResult(order).get(timeout=SOON)
    everyone.ledger.wait_for_signal(order, "replayed", WORKERS - 1)
    assert len(everyone.ledger.runs(order)) == 2
