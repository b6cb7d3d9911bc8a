"""Amazon SQS as the broker, simulated by moto: messages are redelivered by visibility timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from moto.sqs.models import sqs_backends
from typing_extensions import Self

from celery_idempotent.core.clock import lease_now
from celery_idempotent.redelivery import broker as brokers
from tests.servers.moto_server import REGION, MotoServer
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop, check_duplicates, check_retry
from tests.worker.tasks import pack, try_later

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker]

#: Seconds.
LEASE = 2.0
VISIBILITY_TIMEOUT = 4


class Queues(MotoServer):
    """A server of moto that exists within a `with` block; `settings` reach it from any process."""

    def __enter__(self) -> Self:
        super().__enter__()
        #: Settings of Celery's broker.
        self.settings: dict[str, Any] = {
            "broker_url": f"sqs://testing:testing@{self.address}",
            "broker_transport_options": {
                "region": REGION,
                "is_secure": False,
                "wait_time_seconds": 0,
                "polling_interval": 0.1,
            },
        }
        self.client: Any = self.session.client("sqs", endpoint_url=f"http://{self.address}")
        return self

    def messages(self, queue: str) -> int:
        """Returns the number of messages, including delivered and delayed ones."""
        url = self.client.get_queue_url(QueueName=queue)["QueueUrl"]
        response = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        return sum(
            int(response["Attributes"][f"ApproximateNumberOfMessages{suffix}"])
            for suffix in ("", "NotVisible", "Delayed")
        )

    def hidden(self, queue: str) -> list[float]:
        """Returns the seconds after which each delivered message is delivered again."""
        ((_, account),) = sqs_backends.items()
        delivered = account[REGION].queues[queue].pending_messages
        return [message.visible_at / 1000 - time.time() for message in delivered]


@pytest.fixture(scope="module")
def queues() -> Iterator[Queues]:
    with Queues() as queues:
        yield queues


def settings_for(queues: Queues, redeliver_after: float | None, **options: Any) -> dict[str, Any]:
    """Returns the settings of a shop with its own queue; the options are those of the broker."""
    settings = queues.settings
    return {
        **settings,
        "broker_transport_options": {**settings["broker_transport_options"], **options},
        "task_default_queue": f"queue-{uuid4().hex[:8]}",
        "idempotency_lease": LEASE,
        "idempotency_redeliver_after": redeliver_after,
    }


@pytest.fixture(scope="module")
def shared_shop(queues: Queues, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    # By the visibility timeout alone; the last tests have the renewal.
    with open_shop(**settings_for(queues, None, visibility_timeout=VISIBILITY_TIMEOUT)) as shop:
        shop.start_worker(concurrency=3)
        yield shop


def wait_until_empty(queues: Queues, shop: Shop) -> None:
    """Waits until the queue has no message left."""
    queue = shop.app.conf.task_default_queue
    eventually(lambda: queues.messages(queue) == 0, "the queue has no message left")


def test_ten_duplicates_and_a_retry(shop: Shop, queues: Queues, order: str) -> None:
    check_duplicates(shop, pack, order, 10)
    check_retry(shop, try_later, f"retried {order}")
    wait_until_empty(queues, shop)


@pytest.mark.slow
def test_execution_longer_than_the_visibility_timeout_runs_once(
    shop: Shop, queues: Queues, order: str
) -> None:
    result = shop.ledger.start(pack, order)
    # Requeueing the copy deletes the message of both, so that one message is left.
    shop.ledger.wait_for_signal(result.id, "conflicted", number=3)
    queue = shop.app.conf.task_default_queue
    eventually(lambda: queues.messages(queue) == 1, "one message is left")
    shop.ledger.release(order)

    receipt = result.get(timeout=SOON)
    shop.ledger.wait_for_signal(result.id, "replayed")
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert [run.end for run in shop.ledger.runs(order)] == ["returned"]
    wait_until_empty(queues, shop)


@pytest.mark.slow
def test_a_living_worker_renews(open_shop: Callable[..., Shop], queues: Queues, order: str) -> None:
    settings = settings_for(queues, 60.0, visibility_timeout=VISIBILITY_TIMEOUT)
    with open_shop(**settings) as shop:
        shop.start_worker(concurrency=2)
        result = shop.ledger.start(pack, order)
        over = shop.ledger.wait_for_run(order).started_at + 2.5 * VISIBILITY_TIMEOUT
        eventually(lambda: time.time() > over, "twice the visibility timeout is over")
        shop.ledger.release(order)

        assert result.get(timeout=SOON)["receipt"]
        wait_until_empty(queues, shop)
        shop.ledger.wait_for_signal(result.id, "completed")
        names = [received.name for received in shop.ledger.signals(result.id)]
        assert names == ["begun", "completed"]


@pytest.mark.slow
def test_messages_of_a_killed_worker_come_back(
    open_shop: Callable[..., Shop], queues: Queues, order: str
) -> None:
    with open_shop(**settings_for(queues, LEASE, visibility_timeout=3600)) as shop:
        worker = shop.start_worker(concurrency=1)
        results = {order: shop.ledger.start(pack, order)}
        results |= {each: pack.delay(each) for each in (f"{order} 1", f"{order} 2")}
        queue = shop.app.conf.task_default_queue

        def renewed() -> int:
            return sum(0 < seconds <= LEASE for seconds in queues.hidden(queue))

        eventually(lambda: renewed() == 3, "the worker has renewed all of them")
        worker.kill()
        killed_at = time.time()
        shop.ledger.release(order)
        shop.start_worker(concurrency=1)

        for each, result in results.items():
            assert result.get(timeout=SOON)["receipt"]
            # SQS counts whole seconds, and the worker has to start.
            assert shop.ledger.runs(each)[-1].started_at - killed_at < LEASE + 10
        wait_until_empty(queues, shop)


def test_no_message_is_hidden_for_longer_than_sqs_allows(
    shop: Shop, queues: Queues, order: str
) -> None:
    with shop.app.connection_for_read() as connection, connection.SimpleQueue(order) as queue:
        queue.put("held")
        message = queue.get(timeout=SOON)
        broker = brokers.SqsBroker(connection)

        def hidden(age: float) -> float:
            received_at = lease_now() - age
            held: Any = SimpleNamespace(
                delivery_info=message.delivery_info, received_at=received_at
            )
            broker.renew([held], 600.0)
            (seconds,) = queues.hidden(order)
            return seconds

        assert hidden(0.0) == pytest.approx(600, abs=10)
        assert hidden(brokers.SQS_LONGEST - 100) == pytest.approx(100, abs=10)
        assert hidden(brokers.SQS_LONGEST + 1) == pytest.approx(100, abs=10)
        broker.close()
        message.ack()
    assert queues.messages(order) == 0
