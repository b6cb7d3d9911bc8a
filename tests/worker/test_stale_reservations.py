"""Under ``on_store_error="run"``, a message that ran without Redis leaves its reservation there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_idempotent import State
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import OpenShop, Shop
from tests.worker.tasks import in_turn, pack

pytestmark = [pytest.mark.exhaustive, pytest.mark.parametrize("task", [pack, in_turn])]


@pytest.fixture(scope="module")
def shared_shop(open_shop: OpenShop, store: RedisServer) -> Iterator[Shop]:
    settings = {
        "idempotency_redis_url": store.url,
        "idempotency_redis_timeout": 0.5,
        "idempotency_dedupe_publish": True,
        "idempotency_on_store_error": "run",
    }
    with open_shop(**settings) as shop:
        shop.start_worker(concurrency=2)
        yield shop


@pytest.fixture
def stale(task: Any, shop: Shop, store: RedisServer, order: str) -> AsyncResult:
    """A message that was published with a reservation, and ran while the store was down."""
    result = task.apply_async((order,), queue=f"late {order}")
    store.kill()
    shop.control("add_consumer", f"late {order}")
    result.get(timeout=SOON)
    store.restart()
    return result


def test_the_next_publish_is_not_answered_by_it(task: Any, stale: AsyncResult, order: str) -> None:
    following = task.delay(order)

    assert following.id != stale.id
    assert following.get(timeout=SOON) != stale.get()


def test_a_plain_message_never_waits(task: Any, shop: Shop, stale: AsyncResult, order: str) -> None:
    following = shop.app.send_task(task.name, (order,))

    assert following.get(timeout=SOON) != stale.get()


def test_one_that_has_not_run_keeps_it(task: Any, shop: Shop, order: str) -> None:
    waiting = task.apply_async((order,), queue=f"late {order}")
    assert task.delay(order).id == waiting.id
    assert task.idempotency_record(order).state is State.RESERVED
