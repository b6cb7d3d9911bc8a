"""Amazon SQS as the broker, simulated by moto: messages are redelivered by visibility timeout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from moto.sqs.models import sqs_backends

from celery_idempotent.core.clock import lease_now
from celery_idempotent.redelivery import broker as brokers
from tests.servers.moto_server import REGION, MotoServer
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop, check_duplicates, check_retry
from tests.worker.tasks import pack, try_later

pytestmark = pytest.mark.exhaustive

#: Seconds.
LEASE = 2.0
VISIBILITY_TIMEOUT = 4
TRANSPORT = {"region": REGION, "is_secure": False, "wait_time_seconds": 0, "polling_interval": 0.1}


@pytest.fixture(scope="module")
def sqs() -> Iterator[MotoServer]:
    """SQS; the results and records of a shop are in Redis."""
    with MotoServer() as server:
        yield server


def queue_of(name: str) -> Any:
    """Returns a queue as the server has it, which runs in this process."""
    ((_, account),) = sqs_backends.items()
    return account[REGION].queues[name]


def hidden(name: str) -> list[float]:
    """Returns the seconds after which each delivered message is delivered again."""
    messages = queue_of(name).pending_messages
    return [message.visible_at / 1000 - time.time() for message in messages]


def messages(name: str) -> int:
    """Returns the number of messages, including delivered and delayed ones."""
    queue = queue_of(name)
    return sum(
        int(getattr(queue, f"approximate_number_of_messages{suffix}"))
        for suffix in ("", "_not_visible", "_delayed")
    )


def settings_for(sqs: MotoServer, redeliver_after: float | None, visibility_timeout: int) -> Any:
    """Returns the settings of a shop with its own queue."""
    return {
        "broker_url": f"sqs://testing:testing@{sqs.address}",
        "broker_transport_options": {**TRANSPORT, "visibility_timeout": visibility_timeout},
        "task_default_queue": f"queue-{uuid4().hex[:8]}",
        "idempotency_lease": LEASE,
        "idempotency_redeliver_after": redeliver_after,
    }


@pytest.fixture(scope="module")
def shared_shop(sqs: MotoServer, open_shop: OpenShop) -> Iterator[Shop]:
    # By the visibility timeout alone; the last tests have the renewal.
    with open_shop(**settings_for(sqs, None, VISIBILITY_TIMEOUT)) as shop:
        shop.start_worker(concurrency=3)
        yield shop


def wait_until_empty(shop: Shop) -> None:
    """Waits until the queue has no message left."""
    queue = shop.app.conf.task_default_queue
    eventually(lambda: messages(queue) == 0, "the queue has no message left")


def test_ten_duplicates_and_a_retry(shop: Shop, order: str) -> None:
    check_duplicates(shop, pack, order, 10)
    check_retry(shop, try_later, f"retried {order}")
    wait_until_empty(shop)


@pytest.mark.slow
def test_execution_longer_than_the_visibility_timeout_runs_once(shop: Shop, order: str) -> None:
    result = shop.ledger.start(pack, order)
    # Requeueing the copy deletes the message of both, so that one message is left.
    shop.ledger.wait_for_signal(result.id, "conflicted", number=3)
    queue = shop.app.conf.task_default_queue
    eventually(lambda: messages(queue) == 1, "one message is left")
    shop.ledger.release(order)

    receipt = result.get(timeout=SOON)
    shop.ledger.wait_for_signal(result.id, "replayed")
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert [run.end for run in shop.ledger.runs(order)] == ["returned"]
    wait_until_empty(shop)


@pytest.mark.slow
def test_a_living_worker_renews(open_shop: OpenShop, sqs: MotoServer, order: str) -> None:
    settings = settings_for(sqs, 60.0, VISIBILITY_TIMEOUT)
    with open_shop(**settings) as shop:
        shop.start_worker(concurrency=2)
        result = shop.ledger.start(pack, order)
        over = shop.ledger.wait_for_run(order).started_at + 2.5 * VISIBILITY_TIMEOUT
        eventually(lambda: time.time() > over, "twice the visibility timeout is over")
        shop.ledger.release(order)

        assert result.get(timeout=SOON)["receipt"]
        wait_until_empty(shop)
        shop.ledger.wait_for_signal(result.id, "completed")
        names = [received.name for received in shop.ledger.signals(result.id)]
        assert names == ["begun", "completed"]


@pytest.mark.slow
def test_messages_of_a_dead_worker_return(open_shop: OpenShop, sqs: MotoServer, order: str) -> None:
    with open_shop(**settings_for(sqs, LEASE, 3600)) as shop:
        worker = shop.start_worker(concurrency=1)
        results = {order: shop.ledger.start(pack, order)}
        results |= {each: pack.delay(each) for each in (f"{order} 1", f"{order} 2")}
        queue = shop.app.conf.task_default_queue

        def renewed() -> int:
            return sum(0 < seconds <= LEASE for seconds in hidden(queue))

        eventually(lambda: renewed() == 3, "the worker has renewed all of them")
        worker.kill()
        killed_at = time.time()
        shop.ledger.release(order)
        shop.start_worker(concurrency=1)

        for each, result in results.items():
            assert result.get(timeout=SOON)["receipt"]
            # SQS counts whole seconds, and the worker has to start.
            assert shop.ledger.runs(each)[-1].started_at - killed_at < LEASE + 10
        wait_until_empty(shop)


def test_no_message_is_hidden_for_longer_than_sqs_allows(shop: Shop, order: str) -> None:
    with shop.app.connection_for_read() as connection, connection.SimpleQueue(order) as queue:
        queue.put("held")
        message = queue.get(timeout=SOON)
        broker = brokers.SqsBroker(connection)

        def hidden_with(age: float) -> float:
            received_at = lease_now() - age
            held = SimpleNamespace(delivery_info=message.delivery_info, received_at=received_at)
            broker.renew([held], 600.0)
            (seconds,) = hidden(order)
            return seconds

        assert hidden_with(0.0) == pytest.approx(600, abs=10)
        assert hidden_with(brokers.SQS_LONGEST - 100) == pytest.approx(100, abs=10)
        assert hidden_with(brokers.SQS_LONGEST + 1) == pytest.approx(100, abs=10)
        broker.close()
        message.ack()
    assert messages(order) == 0
