"""Messages that end before they begin leave their reservations in Redis."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from celery.result import AsyncResult
from celery.signals import task_prerun

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import handle, task_of

#: Tasks of this module, which only the worker of the new version has.
RESERVED: dict[str, Any] = {"idempotency_dedupe_publish": True}
BURST: dict[str, Any] = {**RESERVED, "idempotency_until": "started"}
new = task_of(handle, "new", **RESERVED)
new_in_turn = task_of(handle, "new_in_turn", idempotency_until="finished", **RESERVED)
new_burst = task_of(handle, "new_burst", **BURST)
ignoring_burst = task_of(handle, "ignoring_burst", idempotency_on_conflict="ignore", **BURST)


@task_prerun.connect
def hang(sender: Any, task_id: str, **_: Any) -> None:
    """Waits before the body while the message is held."""
    if sender.name == "shop.new" or sender.name.startswith("shop.new_"):
        Ledger.of(sender.app).wait_for_release(task_id)


SHOP: dict[str, Any] = {}
WORKERS = [["-Q", "old version", "--concurrency=1"], ["-I", __name__]]


def meets_an_old_worker(task: Any, shop: Shop, order: str) -> AsyncResult:
    result: AsyncResult = task.apply_async((order,), queue="old version")
    eventually(lambda: result.state == "FAILURE", "the message has ended")
    return result


def reaches_its_hard_limit(task: Any, shop: Shop, order: str) -> AsyncResult:
    shop.ledger.hold(f"id of {order}")
    result: AsyncResult = task.apply_async((order,), task_id=f"id of {order}", time_limit=1)
    eventually(lambda: result.state == "FAILURE", "the message has ended")
    return result


def has_a_damaged_body(task: Any, shop: Shop, order: str) -> AsyncResult:
    result: AsyncResult = task.apply_async((order,), queue=f"damaged {order}")
    message = json.loads(shop.redis.lpop(f"damaged {order}"))
    message["body"] = b64encode(b"[[").decode()
    shop.redis.lpush("celery", json.dumps(message))
    eventually(lambda: task.idempotency_record(order) is None, "its reservation has ended")
    return result


def has_a_forbidden_serializer(task: Any, shop: Shop, order: str) -> AsyncResult:
    result: AsyncResult = task.apply_async((order,), serializer="pickle")
    eventually(lambda: task.idempotency_record(order) is None, "its reservation has ended")
    return result


MODES = [new, new_in_turn, new_burst]


@pytest.mark.parametrize(
    ("task", "end"),
    [
        *((task, meets_an_old_worker) for task in MODES),
        *((new, end) for end in (has_a_damaged_body, has_a_forbidden_serializer)),
        *((task, reaches_its_hard_limit) for task in (new, new_burst)),
    ],
)
def test_the_next_call_is_published(shop: Shop, order: str, task: Any, end: Any) -> None:
    ended = end(task, shop, order)
    following = task.delay(order)

    assert following.id != ended.id
    assert following.get(timeout=SOON)["receipt"]
    assert len(shop.ledger.runs(order)) == 1


@pytest.mark.parametrize("task", MODES)
def test_a_message_without_a_reservation_does_not_wait(shop: Shop, order: str, task: Any) -> None:
    meets_an_old_worker(task, shop, order)
    following = shop.app.send_task(task.name, (order,))

    assert following.get(timeout=SOON)["receipt"]


def test_one_that_waited_for_its_turn(shop: Shop, ledger: Ledger, order: str) -> None:
    running = ledger.start(ignoring_burst, order)
    ended = ignoring_burst.apply_async((order,), queue="old version")
    eventually(lambda: ended.state == "FAILURE", "the message has ended")
    following = ignoring_burst.delay(order)
    ledger.release(order)

    assert running.get(timeout=SOON)["receipt"]
    assert following.get(timeout=SOON)["receipt"]


def test_one_that_is_put_back_keeps_its_reservation(shop: Shop, ledger: Ledger, order: str) -> None:
    """Also if a copy of another message ends without having begun, just before it and after it."""
    ledger.start(new_burst, order)
    waiting = None
    for other in (f"before {order}", f"after {order}"):
        for task_id in (other, f"copy of {other}"):
            assert new.apply_async((other,), task_id=task_id).get(timeout=SOON)["receipt"]
        waiting = waiting or ledger.duplicate(new_burst, order)

    assert new_burst.delay(order).id == waiting.id
    ledger.release(order)
    assert waiting.get(timeout=SOON)["receipt"]
