"""Amazon SQS as the broker, simulated by moto: messages are redelivered by visibility timeout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.sqs import Queues
from tests.waiting import SOON, eventually
from tests.worker.failing_tasks import try_later
from tests.worker.harness import Shop
from tests.worker.tasks import pack

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker]

#: Seconds.
LEASE = 2.0
VISIBILITY_TIMEOUT = 4


@pytest.fixture(scope="module")
def queues() -> Iterator[Queues]:
    with Queues() as queues:
        yield queues


def settings_for(queues: Queues, **options: Any) -> dict[str, Any]:
    """Returns the settings of a shop with its own queue."""
    settings = queues.settings
    return {
        **settings,
        "broker_transport_options": {**settings["broker_transport_options"], **options},
        "task_default_queue": f"queue-{uuid4().hex[:8]}",
        "idempotency_lease": LEASE,
    }


@pytest.fixture(scope="module")
def shared_shop(queues: Queues, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with open_shop(**settings_for(queues, visibility_timeout=VISIBILITY_TIMEOUT)) as shop:
        shop.start_worker(concurrency=3)
        yield shop


def wait_until_empty(queues: Queues, shop: Shop) -> None:
    """Waits until the queue has no message left."""
    queue = shop.app.conf.task_default_queue
    eventually(lambda: queues.messages(queue) == 0, "the queue has no message left")


def test_ten_duplicates_cause_no_execution(shop: Shop, queues: Queues, order: str) -> None:
    shop.ledger.hold(order)
    first = pack.delay(order)
    shop.ledger.wait_for_run(order)
    duplicates = [pack.delay(order) for _ in range(10)]
    for duplicate in duplicates:
        shop.ledger.wait_for_signal(duplicate.id, "conflicted")
    shop.ledger.release(order)

    receipts = [result.get(timeout=SOON) for result in [first, *duplicates]]

    assert receipts == [receipts[0]] * 11
    assert len(shop.ledger.runs(order)) == 1
    wait_until_empty(queues, shop)


@pytest.mark.slow
def test_execution_longer_than_the_visibility_timeout_runs_once(
    shop: Shop, queues: Queues, order: str
) -> None:
    shop.ledger.hold(order)
    result = pack.delay(order)
    shop.ledger.wait_for_run(order)
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


def test_retry_runs_again_then_replays(shop: Shop, queues: Queues, order: str) -> None:
    receipt = try_later.delay(order, 0.1).get(timeout=SOON)

    assert try_later.delay(order, 0.1).get(timeout=SOON) == receipt
    assert [run.end for run in shop.ledger.runs(order)] == ["Retry", "returned"]
    wait_until_empty(queues, shop)


@pytest.mark.slow
def test_task_of_a_killed_worker_runs_again(
    open_shop: Callable[..., Shop], queues: Queues, order: str
) -> None:
    with open_shop(**settings_for(queues, visibility_timeout=VISIBILITY_TIMEOUT)) as shop:
        worker = shop.start_worker(concurrency=1)
        shop.ledger.hold(order)
        result = pack.delay(order)
        shop.ledger.wait_for_run(order)
        worker.kill()
        shop.start_worker(concurrency=1)
        shop.ledger.release(order)

        receipt = result.get(timeout=SOON)
        assert pack.delay(order).get(timeout=SOON) == receipt
        assert [run.end for run in shop.ledger.runs(order)] == [None, "returned"]
        wait_until_empty(queues, shop)
