"""``idempotency_result_ttl`` of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain
from celery.result import AsyncResult

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge, flaky, pack, try_later

TTL = 600

CALLS: dict[str, Callable[[Shop, str], AsyncResult]] = {
    "apply_async": lambda shop, order: pack.apply_async((order,), idempotency_result_ttl=TTL),
    "set": lambda shop, order: pack.s(order).set(idempotency_result_ttl=TTL).delay(),
    "chain": lambda shop, order: chain(
        charge.si(order), pack.si(order).set(idempotency_result_ttl=TTL)
    ).delay(),
    "countdown": lambda shop, order: pack.apply_async(
        (order,), idempotency_result_ttl=TTL, countdown=0.1
    ),
    "send_task": lambda shop, order: shop.app.send_task(
        "shop.pack", (order,), headers={"idempotency_result_ttl": TTL}
    ),
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
    assert failing.state == "FAILURE"
    assert retention(flaky, order, 1) == pytest.approx(TTL, abs=1)


def test_other_calls_keep_the_option_of_the_task(shop: Shop, order: str) -> None:
    pack.delay(order).get(timeout=SOON)

    assert retention(pack, order) == pytest.approx(86400, abs=1)


@pytest.mark.parametrize("value", [0, "soon", -1])
def test_unusable_one_is_refused_by_the_worker(
    shop: Shop, ledger: Ledger, order: str, value: object
) -> None:
    result = shop.app.send_task("shop.pack", (order,), headers={"idempotency_result_ttl": value})

    with pytest.raises(Exception, match="shop.pack: idempotency_result_ttl must be "):
        result.get(timeout=SOON)
    assert ledger.runs(order) == []
    (received,) = ledger.signals(result.id, "refused")
    assert received.details["reason"] == "invalid"


@pytest.mark.exhaustive
def test_duplicate_that_met_the_run_gets_an_outcome_that_expires_sooner(
    ledger: Ledger, order: str
) -> None:
    first = ledger.start(pack, order, idempotency_result_ttl=1)
    duplicate = pack.apply_async((order,), idempotency_result_ttl=1)
    # It comes back after 1.5 s at least, when the result would have expired.
    ledger.wait_for_signal(duplicate.id, "conflicted", number=2)
    ledger.release(order)

    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
    assert len(ledger.runs(order)) == 1
    ledger.wait_for_signal(duplicate.id, "replayed")
    assert [received.name for received in ledger.signals(duplicate.id)][-1] == "replayed"
