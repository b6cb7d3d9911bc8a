"""A task that forwards its headers: children do not get the parent's key or its opt-out."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.core.store import commands, run_sync
from tests.waiting import eventually
from tests.worker.canvas_tasks import ITEMS, fan_out
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import pack

WAYS = ["apply_async", "by name", "signature", "group", "plain task", "eager", "itself"]


def publish(shop: Shop, order: str, way: str, parent: str) -> None:
    """Publishes a parent whose message has headers of the library."""
    if parent == "own key":
        fan_out.apply_async((order, way), idempotency_key=f"request {order}")
    elif parent == "disabled":
        fan_out.apply_async((order, way), idempotency_key=False)
    elif parent == "retried":
        fan_out.delay(order, way, after="retry")
    elif parent == "retried, own key":
        fan_out.apply_async((order, way, None, "retry"), idempotency_key=f"request {order}")
    elif parent == "requeued":
        reserve_key(order, way)
        fan_out.delay(order, way)
    else:
        key: Any = False if parent == "disabled by name" else f"request {order}"
        shop.app.send_task("shop.fan_out", (order, way), headers={"idempotency_key": key})


def reserve_key(order: str, way: str) -> None:
    """Reserves the key of the order, so that its next message has a conflict."""
    key = fan_out.idempotency_key_of(order, way)
    store = fan_out.idempotency_configuration.executor.store
    reserve = commands.reserve(key, "another task id", hold_ms=800)
    assert run_sync(store.execute(reserve)).case == "reserved"


def check(ledger: Ledger, order: str, way: str) -> None:
    """Checks that each child has run once, with the key of its own rule."""
    children = [f"{item} {order}" for item in range(ITEMS)]
    if way == "itself":
        eventually(lambda: all(map(ledger.notes, children)), "each child has run")
        assert [len(ledger.notes(child)) for child in children] == [1] * ITEMS
        return
    runs = [ledger.wait_for_run(child) for child in children]
    assert [run.key for run in runs] == [str(pack.idempotency_key_of(child)) for child in children]
    assert all(run.protected for run in runs)
    assert [len(ledger.runs(child)) for child in children] == [1] * ITEMS


PARENTS = (
    *("own key", "own key by name", "disabled", "disabled by name"),
    *("retried", "retried, own key", "requeued"),
)


@pytest.mark.parametrize(
    ("parent", "way"),
    [
        *((parent, way) for parent in PARENTS for way in ("apply_async", "by name")),
        *((parent, way) for parent in ("retried, own key", "disabled") for way in WAYS[2:]),
    ],
)
def test_child_has_the_key_of_its_own_rule(
    shop: Shop, ledger: Ledger, order: str, parent: str, way: str
) -> None:
    publish(shop, order, way, parent)
    check(ledger, order, way)
