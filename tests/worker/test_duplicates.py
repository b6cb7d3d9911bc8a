"""A duplicate gets exactly the result of the first execution, without a second one."""

from __future__ import annotations

import json
import uuid
from datetime import date, datetime, timezone
from datetime import time as time_of_day
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import CallOutcome, ResultNotStoredError, State, outcome_of
from tests.apps import run_command
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop, check_duplicates
from tests.worker.ledger import Ledger
from tests.worker.tasks import forgetful, give, pack, silent, thrifty, unserialisable

#: `tests/unit/payload/test_codec.py` has more of them.
JSON_VALUES = [
    {"a": [1, {"b": [None, True, "ü"]}], "c": {}},
    datetime(2026, 11, 21, 12, 30, 15, 123456, tzinfo=timezone.utc),
    date(2026, 11, 21),
    time_of_day(12, 30),
    Decimal("19.90"),
    uuid.UUID("12345678-1234-5678-1234-567812345678"),
    b"\x00\xff bytes",
    (1, 2),
]


def test_twenty_duplicates_of_a_running_call_cause_no_execution(shop: Shop, order: str) -> None:
    check_duplicates(shop, pack, order, 20)


def test_args_kwargs_and_send_task_have_the_same_key(shop: Shop, order: str) -> None:
    receipt = pack.delay(order, 7).get(timeout=SOON)

    others = [
        pack.delay(order, amount=7),
        pack.delay(amount=7, order=order),
        shop.app.send_task("shop.pack", (order, 7)),
        shop.app.send_task("shop.pack", kwargs={"order": order, "amount": 7}),
    ]

    assert [other.get(timeout=SOON) for other in others] == [receipt] * 4
    assert len(shop.ledger.runs(order)) == 1


@pytest.mark.parametrize("value", [None, 0, "", [], False, JSON_VALUES], ids=repr)
def test_a_replayed_value_equals_the_first_in_type(ledger: Ledger, order: str, value: Any) -> None:
    first, second = (give.delay(order, value).get(timeout=SOON) for _ in range(2))

    assert exactly(second) == exactly(first)
    assert len(ledger.runs(order)) == 1


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (forgetful, "idempotency_store_result is off"),
        (thrifty, "idempotency_max_result_size"),
        # Celery cannot return it to the first caller either.
        (unserialisable, "cannot serialize the type"),
    ],
)
def test_if_no_value_is_stored_a_duplicate_gets_an_error_and_does_not_run(
    ledger: Ledger, order: str, task: Any, reason: str
) -> None:
    first = task.delay(order)
    value = first.get(timeout=SOON, propagate=False)
    record = task.idempotency_record(order)

    assert (record.state, record.task_id) == (State.COMPLETED, first.id)
    assert type(value).__name__ == ("EncodeError" if task is unserialisable else "dict")
    with pytest.raises(ResultNotStoredError, match=reason):
        task.delay(order).get(timeout=SOON)
    assert [run.end for run in ledger.runs(order)] == ["returned"]


# The id that Flower and Sentry show leads to the record, by one read in Redis.
@pytest.mark.parametrize("task", [pack, silent])
def test_task_id_of_a_replay_leads_to_the_record(shop: Shop, order: str, task: Any) -> None:
    first = task.delay(order)
    shop.ledger.wait_for_signal(first.id, "completed")
    duplicate = task.delay(order)
    shop.ledger.wait_for_signal(duplicate.id, "replayed")

    record = task.idempotency_record(order)
    store = task.idempotency_configuration.executor.store
    # The worker writes the reference without waiting.
    eventually(lambda: store.reference(duplicate.id) is not None, "it has a reference")
    document = show(shop, duplicate.id)
    whose = {"key": record.key, "task_id": first.id}
    assert whose.items() <= document.items()
    end = {"end": "replayed", "replayed": True, "token": record.token, "attempt": 1}
    assert document["duplicate"] == {**whose, **end}
    expected = CallOutcome(record.key, True, first.id, record.token, 1)
    assert outcome_of(duplicate) == outcome_of(task.AsyncResult(duplicate.id)) == expected
    assert outcome_of(first) is None
    own = outcome_of(first, task.idempotency_key_of(order))
    assert own == CallOutcome(record.key, False, first.id, record.token, 1)


def test_task_id_of_a_redelivery_is_its_own(shop: Shop, order: str) -> None:
    first = pack.delay(order)
    first.get(timeout=SOON)
    pack.apply_async((order,), task_id=first.id)
    shop.wait_until_empty()
    pack.delay(order).get(timeout=SOON)  # behind it

    store = pack.idempotency_configuration.executor.store
    assert store.reference(first.id) is None
    assert "duplicate" not in show(shop, first.id)


def show(shop: Shop, task_id: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run_command(shop.app, "show", task_id, "--json"))
    return document


def exactly(value: Any) -> Any:
    """Returns `value` with all its types, because ``False == 0``."""
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [exactly(item) for item in value]
    return type(value), value


def test_eager_calls_share_the_key_with_workers(ledger: Ledger, order: str) -> None:
    assert pack.apply((order,)).get() == pack.delay(order).get(timeout=SOON)
    keys = [f"{n} {order}" for n in (1, 2, 1)]
    first, second, third = (pack.apply((order,), idempotency_key=key).get() for key in keys)
    assert first == third != second
    assert len(ledger.runs(order)) == 3


def test_duplicate_waits_for_its_storage(open_shop: OpenShop, order: str, tmp_path: Path) -> None:
    large, storage = "VISA-1111-1111-1111" * 40, f"file://{tmp_path}"
    with open_shop(idempotency_max_result_size=500, idempotency_offload_backend=storage) as shop:
        worker = shop.start_worker()
        give.delay(order, large).get(timeout=SOON)
        path = tmp_path / give.idempotency_record(order, large).body.decode()
        moved = path.rename(path.with_suffix(".moved"))
        path.mkdir()
        duplicate = give.delay(order, large)
        worker.wait_for_log(f"{duplicate.id} cannot get its outcome: idempotency_offload")
        path.rmdir()
        moved.rename(path)

        assert duplicate.get(timeout=SOON) == large
        assert len(shop.ledger.runs(order)) == 1
