"""The signals of the worker with all their arguments.

`test_takeover` tests `taken_over` and `lease_lost`; `test_store_away` tests `store_unavailable`;
`test_reports` tests `outcome_unsaved`.
"""

from __future__ import annotations

from typing import Any

import pytest
from celery.result import AsyncResult

from celery_idempotent import signals
from tests.waiting import SOON
from tests.worker.ledger import RECORD_ATTRIBUTES, Ledger, ReceivedSignal
from tests.worker.tasks import charge, final, flaky, pack, raising, thrifty, try_later


def received(ledger: Ledger, result: AsyncResult, name: str) -> ReceivedSignal:
    """Waits for the only signal of that name of a task."""
    signal = ledger.wait_for_signal(result.id, name)
    assert len(ledger.signals(result.id, name)) == 1
    return signal


@pytest.mark.parametrize(
    ("task", "name", "more"),
    [
        (pack, "begun", {}),
        (pack, "completed", {}),
        (final, "failed", {"error": "OutOfStockError"}),
        (flaky, "released", {"error": "OutOfStockError", "reserved_seconds": None}),
        (thrifty, "not_stored", {"reason": "it is larger than idempotency_max_result_size"}),
    ],
)
def test_of_an_execution(ledger: Ledger, order: str, task: Any, name: str, more: Any) -> None:
    result = task.delay(order)

    signal = received(ledger, result, name)
    run = ledger.wait_for_run(order)  # begun is sent before the body runs
    if "error" in more:
        more = {**more, "error": [more["error"], order, 3]}
    assert signal.sender == task.name
    expected = {"task_id": result.id, "key": run.key, "label": "", "token": run.token, "attempt": 1}
    assert signal.details == {**expected, **more}


def test_replayed(ledger: Ledger, order: str) -> None:
    first = pack.delay(order)
    first.get(timeout=SOON)
    duplicate = pack.delay(order)

    signal = received(ledger, duplicate, "replayed")
    stored = pack.idempotency_record(order)
    record = {name: getattr(stored, name) for name in RECORD_ATTRIBUTES}
    assert record["task_id"] == first.id
    about = {"task_id": duplicate.id, "key": stored.key, "label": ""}
    assert signal.details == {**about, "record": record}
    assert [signal.name for signal in ledger.signals(duplicate.id)] == ["replayed"]


def test_conflicted(ledger: Ledger, order: str) -> None:
    first = ledger.start(raising, order)
    run = ledger.wait_for_run(order)
    duplicate = raising.delay(order)

    signal = received(ledger, duplicate, "conflicted")
    record = signal.details.pop("record")
    assert (record["state"], record["task_id"]) == ("STARTED", first.id)
    assert record["worker"].endswith(f"/{run.pid}")
    about = {"task_id": duplicate.id, "key": run.key, "label": ""}
    assert signal.details == {**about, "policy": "raise"}


def test_released_for_a_retry_has_reserved_seconds(ledger: Ledger, order: str) -> None:
    result = try_later.delay(order, 0.5)

    signal = received(ledger, result, "released")
    assert signal.details["error"][0] == "Retry"
    assert signal.details["reserved_seconds"] == pytest.approx(0.5 + 60.0)


@pytest.mark.usefixtures("shop", "restored_receivers")
def test_begin_replied(order: str) -> None:
    calls: list[dict[str, Any]] = []
    signals.begin_replied.connect(lambda **details: calls.append(details), weak=False)
    for _ in range(2):
        pack.apply((order,))

    assert [details.pop("case") for details in calls] == ["begun", "finished"]
    for details in calls:
        assert details.pop("sender") is pack._get_current_object()
        assert 0 < details.pop("seconds") < SOON
        assert details.keys() == {"signal", "task_id", "key", "label"}


def test_refused(ledger: Ledger, order: str) -> None:
    charge.delay(order, 1).get(timeout=SOON)
    refused = charge.delay(order, 2)
    refused.get(timeout=SOON, propagate=False)

    (signal,) = ledger.signals(refused.id)
    assert signal.name == "refused"
    assert signal.details["key"] == str(charge.idempotency_key_of(order, 1))
    assert (signal.details["reason"], signal.details["at"]) == ("reused", "begin")
    assert signal.details["error"][0] == "KeyReusedError"
