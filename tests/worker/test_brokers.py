"""Crashes, lost connections and dead letters with RabbitMQ, which redelivers immediately.

The other modules have Redis as their broker. Results and records are in Redis here, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu import Connection, Queue

from celery_idempotent.core.task.publish import put_back
from celery_idempotent.core.task.publish.put_back import confirming_producer
from tests.faults.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import SOON, eventually
from tests.worker.harness import LEASE, OpenShop, Shop, check_duplicates, check_retry
from tests.worker.ledger import Run
from tests.worker.tasks import pack, rejecting, try_later

pytestmark = pytest.mark.rabbitmq


def open_on(url: str, open_shop: OpenShop) -> Shop:
    """Returns a shop whose queue is on this broker."""
    queue = f"queue-{os.urandom(4).hex()}"
    return open_shop(idempotency_lease=LEASE, broker_url=url, task_default_queue=queue)


@pytest.fixture(scope="module")
def shared_shop(rabbitmq: RabbitMQ, open_shop: OpenShop) -> Iterator[Shop]:
    with open_on(rabbitmq.url, open_shop) as shop:
        shop.start_worker(concurrency=2)
        yield shop


@pytest.fixture
def proxy(rabbitmq: RabbitMQ) -> Iterator[Proxy]:
    with Proxy(rabbitmq.url) as proxy:
        yield proxy


@pytest.fixture
def doomed(proxy: Proxy, open_shop: OpenShop) -> Iterator[Shop]:
    """A shop whose worker the test kills."""
    with open_on(proxy.url, open_shop) as shop:
        shop.start_worker(concurrency=2)
        yield shop


def test_twenty_duplicates_and_a_retry(shop: Shop, order: str) -> None:
    check_duplicates(shop, pack, order, 20)
    check_retry(shop, try_later, f"retried {order}")


def test_a_requeue_fails_without_a_confirm(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original message is acknowledged next, so the broker must have accepted the new one."""
    monkeypatch.setattr(put_back, "CONFIRM_TIMEOUT", 1)
    app = Celery("confirming", broker=proxy.url, set_as_current=False)
    queue = Queue(f"queue-{os.urandom(4).hex()}")
    with confirming_producer(app) as producer:
        producer.publish({"number": 1}, routing_key=queue.name, declare=[queue])
        proxy.black_hole()
        with pytest.raises(TimeoutError):
            producer.publish({"number": 2}, routing_key=queue.name)
        proxy.heal()


def run_again(doomed: Shop, result: AsyncResult, order: str) -> Run:
    """Kills the worker, whose call another worker runs; returns that execution."""
    doomed.workers[0].kill()
    doomed.start_worker(concurrency=1)
    doomed.ledger.release(order)
    receipt = result.get(timeout=SOON)
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert [run.end for run in doomed.ledger.runs(order)] == [None, "returned"]
    return doomed.ledger.runs(order)[1]


def test_task_of_a_killed_worker_runs_again_after_the_lease(doomed: Shop, order: str) -> None:
    result = doomed.ledger.start(pack, order)
    killed = doomed.ledger.wait_for_run(order)

    second = run_again(doomed, result, order)
    assert second.recovered
    assert second.started_at - killed.started_at >= LEASE


# The message is redelivered, to the worker that runs it or to another one.
def test_redelivered_message_runs_once(rabbitmq: RabbitMQ, shop: Shop, order: str) -> None:
    result = shop.ledger.start(pack, order)
    rabbitmq.close_connections()
    shop.ledger.wait_for_signal(result.id, "conflicted")
    assert result.state == "PENDING", "the copy has stored no state"
    shop.ledger.release(order)

    receipt = result.get(timeout=SOON)
    shop.ledger.wait_for_signal(result.id, "replayed")
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert result.get(timeout=SOON) == receipt
    assert [run.end for run in shop.ledger.runs(order)] == ["returned"]
    shop.ledger.wait_for_signal(result.id, "completed")
    assert len(shop.ledger.signals(result.id, "completed")) == 1


def test_copy_is_requeued_before_it_is_acknowledged(proxy: Proxy, doomed: Shop, order: str) -> None:
    result = doomed.ledger.start(pack, order)
    proxy.cut()
    doomed.ledger.wait_for_signal(result.id, "conflicted")

    # After this, no worker can requeue the original or the copy.
    run_again(doomed, result, order)


@pytest.mark.slow
def test_expired_copy_is_not_lost(proxy: Proxy, doomed: Shop, order: str) -> None:
    # RabbitMQ drops what has expired before it is redelivered.
    seconds = 12
    result = doomed.ledger.start(pack, order, expires=seconds)
    run = doomed.ledger.wait_for_run(order)
    proxy.cut()
    doomed.ledger.wait_for_signal(result.id, "conflicted")
    eventually(lambda: time.time() > run.started_at + seconds, "it has expired")

    # A broker that knew the expiry would drop the message now.
    run_again(doomed, result, order)


def test_rejected_one_is_dead_lettered(rabbitmq: RabbitMQ, open_shop: OpenShop, order: str) -> None:
    dead_letter_arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    queue = {"exchange": "alive", "binding_key": "alive", "queue_arguments": dead_letter_arguments}
    queues = {"task_queues": {"alive": queue}, "task_default_queue": "alive"}
    shop = open_shop(broker_url=rabbitmq.url, **queues)
    with Connection(rabbitmq.url) as connection, shop:
        dead_letter_queue = connection.SimpleQueue("dead")
        shop.start_worker(concurrency=2)
        first = shop.ledger.start(rejecting, order)
        duplicate = rejecting.delay(order)

        message = dead_letter_queue.get(timeout=SOON)
        shop.ledger.release(order)

        assert message.headers["id"] == duplicate.id
        assert message.headers["x-death"][0]["reason"] == "rejected"
        message.ack()
        assert first.get(timeout=SOON)["receipt"]
        eventually(lambda: len(shop.ledger.runs(order)) == 1, "the duplicate has not run")
