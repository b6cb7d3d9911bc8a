"""A message that an exchange copies to several queues: each copy returns to its own queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu import Exchange, Queue
from kombu.common import Broadcast

from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop
from tests.worker.shop import app
from tests.worker.tasks import pack, try_later

EVERYONE = "everyone"
SERVICES = [Queue(name, Exchange("orders", "topic"), "order.#") for name in ("bills", "audits")]

if app is not None:
    app.conf.task_queues = [Queue("celery"), Broadcast(EVERYONE), *SERVICES]


pytestmark = pytest.mark.exhaustive

COPIES = 2
_QUEUE = Broadcast(EVERYONE)
# With Redis, the publisher must declare the fanout exchange.
TO_EVERYONE = {"queue": _QUEUE, "declare": [_QUEUE.exchange]}


@pytest.fixture(
    scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)]
)
def shared_shop(request: pytest.FixtureRequest, open_shop: OpenShop) -> Iterator[Shop]:
    broker = {}
    if request.param == "rabbitmq":
        server: RabbitMQ = request.getfixturevalue("rabbitmq")
        broker = {"broker_url": server.url}
    with open_shop(imports=[__name__], **broker) as shop:
        for _ in range(COPIES):
            shop.start_worker(concurrency=2)
        yield shop


def received(shop: Shop, task_id: str) -> int:
    """Returns how often workers have logged that they received the message."""
    return sum(worker.logs().count(f"[{task_id}] received") for worker in shop.workers)


def test_each_worker_requeues_its_copy_once(shop: Shop, order: str) -> None:
    shop.ledger.start(pack, order)
    pack.apply_async((order,), task_id=order, **TO_EVERYONE)

    shop.ledger.wait_for_signal(order, "conflicted", COPIES)
    shop.ledger.release(order)

    assert pack.AsyncResult(order).get(timeout=SOON)["receipt"]
    shop.ledger.wait_for_signal(order, "replayed", COPIES)
    assert len(shop.ledger.signals(order, "conflicted")) == COPIES
    assert received(shop, order) == COPIES  # a message that comes back is not logged again
    assert len(shop.ledger.runs(order)) == 1


def test_retry_is_delivered_once(shop: Shop, order: str) -> None:
    try_later.apply_async((order, 1), task_id=order, **TO_EVERYONE)

    assert try_later.AsyncResult(order).get(timeout=SOON)
    shop.ledger.wait_for_signal(order, "replayed", COPIES - 1)
    assert len(shop.ledger.runs(order)) == 2


def test_a_copy_from_a_topic_exchange_returns_to_its_queue(shop: Shop, order: str) -> None:
    """Through the exchange, it would also reach the other queue, or on Redis none."""
    shop.ledger.start(pack, order)
    pack.apply_async((order,), task_id=order, queue=SERVICES[0], routing_key="order.paid")

    def returned() -> list[dict[str, str]]:
        replies = shop.app.control.inspect().scheduled() or {}
        waiting = [each["request"] for worker in replies.values() for each in worker]
        return [each["delivery_info"] for each in waiting if each["id"] == order]

    keys = {(info["exchange"], info["routing_key"]) for info in eventually(returned)}
    assert keys <= {("", "bills"), ("", "audits")}
    shop.ledger.release(order)
    assert pack.AsyncResult(order).get(timeout=SOON)["receipt"]
