"""RabbitMQ's quorum queues, with Celery's native delayed delivery and a delivery limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from celery.result import AsyncResult

from celery_idempotent.core.task.publish.put_back import PAUSE_FACTOR, REQUEUE_PAUSE
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON
from tests.worker.harness import OpenShop, Shop, check_retry
from tests.worker.tasks import pack, try_later

pytestmark = pytest.mark.rabbitmq

#: Seconds; shorter than the default.
CONFIRM_TIMEOUT = 0.5
#: Seconds; also the longest delay of a duplicate.
LEASE = 2.0
#: Default number of requeues after which a queue drops a message; RabbitMQ 4 has 20.
DELIVERY_LIMIT = 2


def settings_for(rabbitmq: RabbitMQ, delivery_limit: int) -> dict[str, Any]:
    """Returns the settings of a shop with its own two quorum queues."""
    names = [f"queue-{uuid4().hex[:8]}" for _ in range(2)]
    queues = {
        name: {
            "exchange": name,
            "exchange_type": "topic",
            "binding_key": name,
            "queue_arguments": {"x-queue-type": "quorum", "x-delivery-limit": delivery_limit},
        }
        for name in names
    }
    return {
        "broker_url": rabbitmq.url,
        "task_queues": queues,
        "task_default_queue": names[0],
        "idempotency_lease": LEASE,
        "shop_confirm_timeout": CONFIRM_TIMEOUT,
    }


@pytest.fixture(scope="module")
def shared_shop(rabbitmq: RabbitMQ, open_shop: OpenShop) -> Iterator[Shop]:
    with open_shop(**settings_for(rabbitmq, DELIVERY_LIMIT)) as shop:
        for queue in shop.app.conf.task_queues:
            shop.start_worker("--queues", queue)
        yield shop


@pytest.fixture(params=["the default queue", "another queue"])
def queue(request: pytest.FixtureRequest, shop: Shop) -> str:
    default, other = shop.app.conf.task_queues
    return default if request.param == "the default queue" else other


@pytest.mark.slow
def test_duplicate_is_delayed_until_it_replays(shop: Shop, order: str, queue: str) -> None:
    """Its message is published again with a countdown, which RabbitMQ delays since Celery 5.5."""
    first = shop.ledger.start(pack, order, queue=queue)
    duplicate = pack.apply_async((order,), queue=queue)
    # More often than the delivery limit of the queue.
    shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=DELIVERY_LIMIT + 2)
    shop.ledger.release(order)

    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
    assert receivers(shop, duplicate.id) == [queue]
    assert "reject requeue=True" not in shop.workers[0].logs() + shop.workers[1].logs()


def test_short_retry_runs_again(shop: Shop, order: str, queue: str) -> None:
    result = check_retry(shop, try_later, order, queue=queue)

    assert receivers(shop, result.id) == [queue]


@contextmanager
def blocked(
    rabbitmq: RabbitMQ, open_shop: OpenShop, order: str, delivery_limit: int
) -> Iterator[tuple[Shop, AsyncResult, AsyncResult]]:
    """A broker that delivers messages but accepts none, as during a memory or disk alarm.

    Yields:
        A shop, a call that runs, and its duplicate, received when nothing can be published.
    """
    settings = settings_for(rabbitmq, delivery_limit)
    with open_shop(**settings, task_publish_retry=False) as shop:
        worker = shop.start_worker()
        first = shop.ledger.start(pack, order)
        # Only the main process is suspended: its pool renews the lease.
        worker.container.process.send_signal(signal.SIGSTOP)
        duplicate = pack.delay(order)
        rabbitmq.block_publishers()
        worker.resume()
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=3)
        try:
            yield shop, first, duplicate
        finally:
            rabbitmq.unblock_publishers()


@pytest.mark.slow
def test_duplicate_is_not_lost_while_publishers_are_blocked(
    rabbitmq: RabbitMQ, open_shop: OpenShop, order: str
) -> None:
    with blocked(rabbitmq, open_shop, order, 2) as (shop, first, duplicate):
        # After a constant pause, the message would be requeued again, and the queue would drop it.
        time.sleep(2 * (REQUEUE_PAUSE + 2 * CONFIRM_TIMEOUT))
        assert shop.workers[0].logs().count("is returned to the broker") == 2
        rabbitmq.unblock_publishers()
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=4)
        shop.ledger.release(order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)


@pytest.mark.slow
def test_a_warm_shutdown_is_in_time(rabbitmq: RabbitMQ, open_shop: OpenShop, order: str) -> None:
    with blocked(rabbitmq, open_shop, order, 5) as (shop, first, duplicate):
        (worker,) = shop.workers
        shop.ledger.release(order)
        started_at = time.monotonic()
        worker.container.request_shutdown()
        assert worker.wait_for_exit() == 0
        assert time.monotonic() - started_at < REQUEUE_PAUSE * PAUSE_FACTOR**2 / 2
        rabbitmq.unblock_publishers()
        shop.start_worker()

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(shop.ledger.runs(order)) == 1


def receivers(shop: Shop, task_id: str) -> list[str]:
    """Returns the queues whose workers have received messages of the task."""
    workers = zip(shop.app.conf.task_queues, shop.workers, strict=True)
    return [queue for queue, worker in workers if f"[{task_id}] received" in worker.logs()]
