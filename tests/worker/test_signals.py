"""Each signal, with all that `celery_idempotent.signals` says of it, heard inside the worker.

Those of a takeover, of a lost lease and of a store that is away are heard where these befall a
task: in `test_takeover` and `test_store_away`.
"""

from __future__ import annotations

import pytest
from celery.result import AsyncResult

from celery_idempotent import signals
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Heard, Ledger
from tests.worker.shop import charge, final, flaky, pack, raising, try_later

pytestmark = pytest.mark.worker


def heard(ledger: Ledger, result: AsyncResult, name: str) -> Heard:
    """The one signal of that name about a task."""
    signal = ledger.wait_for_signal(result.id, name)
    assert len(ledger.signals(result.id, name)) == 1
    return signal


def test_begun(ledger: Ledger, order: str) -> None:
    result = pack.delay(order)

    signal = heard(ledger, result, "begun")
    (run,) = ledger.runs(order)
    assert signal.sender == "shop.pack"
    assert signal.details == {
        "task_id": result.id,
        "key": run.key,
        "token": run.token,
        "attempt": 1,
    }


def test_completed(ledger: Ledger, order: str) -> None:
    result = pack.delay(order)

    signal = heard(ledger, result, "completed")
    (run,) = ledger.runs(order)
    assert signal.sender == "shop.pack"
    assert signal.details == {
        "task_id": result.id,
        "key": run.key,
        "token": run.token,
        "attempt": 1,
    }


def test_a_run_is_begun_then_completed_and_nothing_else(ledger: Ledger, order: str) -> None:
    result = pack.delay(order)
    heard(ledger, result, "completed")

    assert [signal.name for signal in ledger.signals(result.id)] == ["begun", "completed"]


def test_replayed(shop: Shop, ledger: Ledger, order: str) -> None:
    first = pack.delay(order)
    first.get(timeout=SOON)
    duplicate = pack.delay(order)

    signal = heard(ledger, duplicate, "replayed")
    (run,) = ledger.runs(order)
    assert signal.details.pop("record") == {
        "state": "COMPLETED",
        "key": run.key,
        "task": "shop.pack",
        "task_id": first.id,
        "worker": pack.idempotency_record(order).worker,
        "token": run.token,
        "attempt": 1,
    }
    assert signal.details == {"task_id": duplicate.id, "key": run.key}
    assert [signal.name for signal in ledger.signals(duplicate.id)] == ["replayed"]


def test_conflicted(ledger: Ledger, order: str) -> None:
    ledger.hold(order)
    first = raising.delay(order)
    run = ledger.wait_for_run(order)
    duplicate = raising.delay(order)

    signal = heard(ledger, duplicate, "conflicted")
    record = signal.details.pop("record")
    assert (record["state"], record["task_id"]) == ("STARTED", first.id)
    assert record["worker"].endswith(f"/{run.pid}")
    assert signal.details == {"task_id": duplicate.id, "key": run.key, "policy": "raise"}


def test_failed(ledger: Ledger, order: str) -> None:
    result = final.delay(order)

    signal = heard(ledger, result, "failed")
    (run,) = ledger.runs(order)
    assert signal.details == {
        "task_id": result.id,
        "key": run.key,
        "token": run.token,
        "attempt": 1,
        "error": ["OutOfStockError", order, 3],
    }


def test_released(ledger: Ledger, order: str) -> None:
    result = flaky.delay(order)

    signal = heard(ledger, result, "released")
    (run,) = ledger.runs(order)
    assert signal.details == {
        "task_id": result.id,
        "key": run.key,
        "token": run.token,
        "attempt": 1,
        "error": ["OutOfStockError", order, 3],
        "reserved_seconds": None,
    }


def test_released_for_a_retry_says_for_how_long(ledger: Ledger, order: str) -> None:
    result = try_later.delay(order, 0.5)

    signal = heard(ledger, result, "released")
    assert signal.details["error"][0] == "Retry"
    assert signal.details["reserved_seconds"] == pytest.approx(0.5 + 60.0)


def test_answered_tells_each_begin_and_how_long_it_took(order: str) -> None:
    heard = []

    def hear(sender: object, **details: object) -> None:
        heard.append((sender, details))

    signals.begin_replied.connect(hear)
    try:
        for _ in range(2):
            pack.apply((order,))
    finally:
        signals.begin_replied.disconnect(hear)

    assert [details.pop("case") for _, details in heard] == ["begun", "finished"]
    for sender, details in heard:
        assert sender is pack._get_current_object()
        assert 0 < details.pop("seconds") < SOON
        assert details.keys() == {"signal", "task_id", "key"}


def test_a_refused_reuse_of_a_key_sends_none(ledger: Ledger, order: str) -> None:
    charge.delay(order, 1).get(timeout=SOON)
    refused = charge.delay(order, 2)
    refused.get(timeout=SOON, propagate=False)

    assert ledger.signals(refused.id) == []
