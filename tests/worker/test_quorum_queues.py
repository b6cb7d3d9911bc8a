"""RabbitMQ's quorum queues, with Celery's native delayed delivery and a delivery limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from celery.result import AsyncResult

from celery_idempotent.core.task.publish.put_back import PAUSE_FACTOR, REQUEUE_PAUSE
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON
from tests.worker.harness import Shop, check_retry
from tests.worker.tasks import pack, try_later

pytestmark = [pytest.mark.worker, pytest.mark.rabbitmq]

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
def shared_shop(rabbitmq: RabbitMQ, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with open_shop(**settings_for(rabbitmq, DELIVERY_LIMIT)) as shop:
        for queue in shop.app.conf.task_queues:
            shop.start_worker("--queues", queue)
        yield shop


@pytest.fixture(params=["the default queue", "another queue"])
def queue(request: pytest.FixtureRequest, shop: Shop) -> str:
    default, other = shop.app.conf.task_queues
    return default if request.param == "the default queue" else other


class TestDelayed:
    """Messages published again with a countdown, which RabbitMQ delays since Celery 5.5."""

    @pytest.mark.slow
    def test_duplicate_is_delayed_until_it_replays(
        self, shop: Shop, order: str, queue: str
    ) -> None:
        first = shop.ledger.start(pack, order, queue=queue)
        duplicate = pack.apply_async((order,), queue=queue)
        # More often than the delivery limit of the queue.
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=DELIVERY_LIMIT + 2)
        shop.ledger.release(order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert receivers(shop, duplicate.id) == [queue]
        assert "reject requeue=True" not in shop.workers[0].logs() + shop.workers[1].logs()

    def test_short_retry_runs_again(self, shop: Shop, order: str, queue: str) -> None:
        result = check_retry(shop, try_later, order, queue=queue)

        assert receivers(shop, result.id) == [queue]


class TestPublishersBlocked:
    """The broker delivers messages but accepts none, as during a memory or disk alarm."""

    @pytest.fixture
    def open_with_limit(
        self, rabbitmq: RabbitMQ, open_shop: Callable[..., Shop]
    ) -> Iterator[Callable[[int], Shop]]:
        with ExitStack() as stack:

            def open_with_limit(delivery_limit: int) -> Shop:
                settings = settings_for(rabbitmq, delivery_limit)
                shop = stack.enter_context(open_shop(**settings, task_publish_retry=False))
                shop.start_worker()
                return shop

            yield open_with_limit
            rabbitmq.unblock_publishers()

    def run_and_block(
        self, shop: Shop, rabbitmq: RabbitMQ, order: str
    ) -> tuple[AsyncResult, AsyncResult]:
        """Runs a task; its duplicate is received when nothing can be published.

        Only the worker's main process is suspended meanwhile: its pool renews the lease.
        """
        (worker,) = shop.workers
        first = shop.ledger.start(pack, order)
        worker.container.process.send_signal(signal.SIGSTOP)
        duplicate = pack.delay(order)
        rabbitmq.block_publishers()
        worker.resume()
        return first, duplicate

    @pytest.mark.slow
    def test_duplicate_is_not_lost(
        self, open_with_limit: Callable[[int], Shop], rabbitmq: RabbitMQ, order: str
    ) -> None:
        shop = open_with_limit(2)
        first, duplicate = self.run_and_block(shop, rabbitmq, order)
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=3)
        # After a constant pause, the message would be requeued again, and the queue would drop it.
        time.sleep(2 * (REQUEUE_PAUSE + 2 * CONFIRM_TIMEOUT))
        assert shop.workers[0].logs().count("is returned to the broker") == 2
        rabbitmq.unblock_publishers()
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=4)
        shop.ledger.release(order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)

    @pytest.mark.slow
    def test_does_not_delay_a_warm_shutdown(
        self, open_with_limit: Callable[[int], Shop], rabbitmq: RabbitMQ, order: str
    ) -> None:
        shop = open_with_limit(5)
        (worker,) = shop.workers
        first, duplicate = self.run_and_block(shop, rabbitmq, order)
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=3)
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
