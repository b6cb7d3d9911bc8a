"""A task that passes its own headers on: no child has its parent's key, or its freedom from one."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.shop import ITEMS, fan_out, pack

pytestmark = pytest.mark.worker

WAYS = ["apply_async", "by name", "signature", "group", "map", "plain task", "eager", "itself"]


def publish(shop: Shop, order: str, way: str, parent: str) -> None:
    """Publish the parent of `way` such that its message carries something."""
    if parent == "own key":
        fan_out.apply_async((order, way), idempotency_key=f"request {order}")
    elif parent == "ungated":
        fan_out.apply_async((order, way), idempotency_key=False)
    elif parent == "retried":
        fan_out.delay(order, way, after="retry")
    elif parent == "retried, own key":
        fan_out.apply_async((order, way, None, "retry"), idempotency_key=f"request {order}")
    elif parent == "put back":
        hold(order, way)
        fan_out.delay(order, way)
    else:
        key: Any = False if parent == "ungated by name" else f"request {order}"
        shop.app.send_task("shop.fan_out", (order, way), headers={"idempotency_key": key})


def hold(order: str, way: str) -> None:
    """Let the next message of the order come back."""
    key = fan_out.idempotency_key_of(order, way)
    store = fan_out.idempotency_configuration.executor.store
    assert (
        run_sync(store.execute(commands.reserve(key, "somebody", hold_ms=800))).case == "reserved"
    )


def check(ledger: Ledger, order: str, way: str, *, protected: bool = True) -> None:
    """Each child has run, once, under the key that its rule makes."""
    children = [f"{item} {order}" for item in range(ITEMS)]
    if way == "itself":
        eventually(lambda: all(map(ledger.notes, children)), "each child has run")
        assert [len(ledger.notes(child)) for child in children] == [1] * ITEMS
        return
    runs = [ledger.wait_for_run(child) for child in children]
    assert [run.key for run in runs] == [str(pack.idempotency_key_of(child)) for child in children]
    assert all(run.protected for run in runs)
    assert [len(ledger.runs(child)) for child in children] == [1] * ITEMS


@pytest.mark.parametrize(
    "parent",
    [
        *("own key", "own key by name", "ungated", "ungated by name"),
        *("retried", "retried, own key", "put back"),
    ],
)
@pytest.mark.parametrize("way", ["apply_async", "by name"])
def test_each_child_has_the_key_of_its_rule(
    shop: Shop, ledger: Ledger, order: str, parent: str, way: str
) -> None:
    publish(shop, order, way, parent)

    check(ledger, order, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parent", ["retried, own key", "ungated"])
def test_each_way_to_send_a_child(
    shop: Shop, ledger: Ledger, order: str, parent: str, way: str
) -> None:
    publish(shop, order, way, parent)

    check(ledger, order, way)


def test_a_key_that_is_set_in_forwarded_headers_is_the_childs(
    shop: Shop, ledger: Ledger, order: str
) -> None:
    """A dictionary that was forwarded, and then given a key on purpose."""
    headers = {"idempotency_key": f"parent {order}"}
    parent = pack.apply_async((f"parent of {order}",), headers=headers)
    parent.get(timeout=SOON)
    forwarded = shop.app.send_task(
        "shop.pack", (order,), headers={**headers, "idempotency_key": f"child {order}"}
    )
    receipt = forwarded.get(timeout=SOON)

    again = pack.apply_async((order,), idempotency_key=f"child {order}")
    assert again.get(timeout=SOON) == receipt
    assert headers == {"idempotency_key": f"parent {order}"}, "the caller's own dictionary"
