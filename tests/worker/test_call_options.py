"""``idempotency_key`` and ``idempotency_result_ttl`` of a call, TASK_ID as a key, and calls without
idempotency.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import chain
from celery.result import AsyncResult

from celery_idempotent import KeyRuleError
from celery_idempotent.core.store import commands, run_sync
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import ITEMS, fan_out
from tests.worker.harness import OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge, flaky, pack, tick, try_later

SERIALIZERS = ["json", "pickle", "msgpack", "yaml"]
SHOP = {"accept_content": SERIALIZERS}


def test_key_of_a_signature_and_in_a_header_of_send_task(shop: Shop, order: str) -> None:
    key = f"request {order}"
    signature = pack.s(order).set(idempotency_key=key)
    by_name = shop.app.send_task("shop.pack", (order,), headers={"idempotency_key": key})

    first = signature.delay().get(timeout=SOON)

    assert by_name.get(timeout=SOON) == first
    assert signature.clone().apply_async().get(timeout=SOON) == first
    duplicate = pack.apply_async((order,), idempotency_key=key)
    assert duplicate.get(timeout=SOON) == first
    assert len(shop.ledger.runs(order)) == 1


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_key_stays_through_every_delivery(ledger: Ledger, order: str, tenant: str | None) -> None:
    """After a countdown, after a retry, and for a duplicate that was requeued."""
    key: Any = f"request {order}" if tenant is None else (tenant, UUID(order))
    first = pack.apply_async((order,), idempotency_key=key, countdown=0.3)
    receipt = first.get(timeout=SOON)
    record = pack.idempotency_record(idempotency_key=key)
    assert (record.task_id, record.result, record.explicit) == (first.id, receipt, True)
    assert pack.idempotency_record(order) is None
    assert pack.idempotency_forget(idempotency_key=key)
    retried = try_later.apply_async((order, 0.1), idempotency_key=key).get(timeout=SOON)
    assert try_later.apply_async((order, 0.1), idempotency_key=key).get(timeout=SOON) == retried

    held = f"held {order}"
    first = ledger.start(pack, held, idempotency_key=key)
    duplicate = ledger.duplicate(pack, held, idempotency_key=key)
    ledger.release(held)
    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)


@pytest.mark.parametrize("key", ["", True, 1.5, ("a", "")], ids=repr)
def test_invalid_key_is_rejected_at_publish(shop: Shop, order: str, key: object) -> None:
    with pytest.raises(KeyRuleError, match=r"shop\.pack: idempotency_key must be"):
        pack.apply_async((order,), idempotency_key=key)


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_the_key_is_the_same_in_any_encoding(ledger: Ledger, order: str, serializer: str) -> None:
    key = ("acme", order)
    call = pack.si(order).set(idempotency_key=key, serializer=serializer)
    first = call.apply_async().get(timeout=SOON)

    if serializer != "yaml":  # which writes no signatures
        in_chain = chain(pack.si(f"first {order}").set(serializer=serializer), call)
        assert in_chain.apply_async(serializer=serializer).get(timeout=SOON) == first
    duplicate = pack.apply_async((order,), idempotency_key=key)
    assert duplicate.get(timeout=SOON) == first
    assert len(ledger.runs(order)) == 1


def test_a_call_may_be_without_idempotency_and_its_signals(shop: Shop, order: str) -> None:
    """``idempotency_key=False``; `test_handlers` has whole tasks without it."""
    pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)
    assert pack.idempotency_record(order) is None
    pack.delay(order).get(timeout=SOON)
    headers = {"idempotency_key": False}
    shop.app.send_task("shop.pack", (order,), headers=headers).get(timeout=SOON)
    failing = flaky.apply_async((f"failing {order}",), idempotency_key=False)
    failing.get(timeout=SOON, propagate=False)

    assert [run.protected for run in shop.ledger.runs(order)] == [False, True, False]
    assert shop.ledger.signals(failing.id) == []


SCHEDULE = {"every half second": {"task": "shop.tick", "schedule": 0.5, "args": ["beaten"]}}


@pytest.mark.exhaustive
def test_beat_runs_a_task_once_per_tick_despite_copies(open_shop: OpenShop, tmp_path: Path) -> None:
    with open_shop(beat_schedule=SCHEDULE, beat_max_loop_interval=0.2) as shop:
        shop.start_worker("--beat", "--schedule", str(tmp_path / "schedule"), concurrency=1)
        third = shop.ledger.wait_for_run("beaten", number=3)
        # A redelivery of the third tick's message.
        tick.apply_async(("beaten",), task_id=third.task_id)
        shop.ledger.wait_for_signal(third.task_id, "replayed")

        eventually(lambda: len(shop.ledger.runs("beaten")) >= 5, "five ticks have run")
        ids = [run.task_id for run in shop.ledger.runs("beaten")]
        assert len(set(ids)) == len(ids)


# A task that forwards its headers: children do not get the parent's key or its opt-out.
WAYS = ["apply_async", "by name", "signature", "group", "plain task", "eager", "itself"]


def publish_parent(shop: Shop, order: str, way: str, parent: str) -> None:
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


def check_children(ledger: Ledger, order: str, way: str) -> None:
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
def test_child_has_the_key_of_its_own_rule(shop: Shop, order: str, parent: str, way: str) -> None:
    publish_parent(shop, order, way, parent)
    check_children(shop.ledger, order, way)


# ``idempotency_result_ttl`` of one call.
TTL = 600
OWN = {"idempotency_result_ttl": TTL}

CALLS: dict[str, Callable[[Shop, str], AsyncResult]] = {
    "apply_async": lambda shop, order: pack.apply_async((order,), **OWN),
    "set": lambda shop, order: pack.s(order).set(**OWN).delay(),
    "chain": lambda shop, order: chain(charge.si(order), pack.si(order).set(**OWN)).delay(),
    "countdown": lambda shop, order: pack.apply_async((order,), countdown=0.1, **OWN),
    "send_task": lambda shop, order: shop.app.send_task("shop.pack", (order,), headers=OWN),
}


def retention(task: Any, *args: Any) -> float:
    """The seconds for which Redis keeps the outcome of a call."""
    record = eventually(lambda: task.idempotency_record(*args), "the record")
    return (record.expires_at - record.finished_at).total_seconds()


@pytest.mark.parametrize("call", CALLS)
def test_is_the_retention_of_the_result(shop: Shop, order: str, call: str) -> None:
    CALLS[call](shop, order).get(timeout=SOON)

    assert retention(pack, order) == pytest.approx(TTL, abs=1)


def test_survives_a_retry(ledger: Ledger, order: str) -> None:
    result = try_later.apply_async((order, 0), idempotency_result_ttl=TTL)
    result.get(timeout=SOON)

    assert retention(try_later, order, 0) == pytest.approx(TTL, abs=1)


def test_survives_a_requeue(ledger: Ledger, order: str) -> None:
    failing = ledger.start(flaky, order, 1)
    duplicate = flaky.apply_async((order,), {"times": 1}, idempotency_result_ttl=TTL)
    ledger.wait_for_signal(duplicate.id, "conflicted")
    ledger.release(order)

    assert duplicate.get(timeout=SOON) == "found one"
    eventually(lambda: failing.state == "FAILURE", "the first one has failed")
    assert retention(flaky, order, 1) == pytest.approx(TTL, abs=1)


def test_other_calls_keep_the_option_of_the_task(shop: Shop, order: str) -> None:
    pack.delay(order).get(timeout=SOON)

    assert retention(pack, order) == pytest.approx(86400, abs=1)


@pytest.mark.parametrize("value", [0, "soon", -1])
def test_unusable_one_is_refused_by_the_worker(shop: Shop, order: str, value: object) -> None:
    result = shop.app.send_task("shop.pack", (order,), headers={"idempotency_result_ttl": value})

    with pytest.raises(Exception, match="shop.pack: idempotency_result_ttl must be "):
        result.get(timeout=SOON)
    assert shop.ledger.runs(order) == []
    (received,) = shop.ledger.signals(result.id, "refused")
    assert received.details["reason"] == "invalid"


@pytest.mark.exhaustive
def test_duplicate_that_met_the_run_gets_an_expired_outcome(ledger: Ledger, order: str) -> None:
    first = ledger.start(pack, order, idempotency_result_ttl=1)
    duplicate = pack.apply_async((order,), idempotency_result_ttl=1)
    # It comes back after 1.5 s at least, when the result would have expired.
    ledger.wait_for_signal(duplicate.id, "conflicted", number=2)
    ledger.release(order)

    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
    assert len(ledger.runs(order)) == 1
    ledger.wait_for_signal(duplicate.id, "replayed")
    assert [received.name for received in ledger.signals(duplicate.id)][-1] == "replayed"
