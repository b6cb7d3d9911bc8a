"""From the task id that monitoring shows to the record that answered the task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_idempotent import CallOutcome, outcome_of
from celery_idempotent.core.record import Record
from celery_idempotent.core.store import reference, run_sync
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.operations.records.query import find_task
from celery_idempotent.operations.records.reader import RecordView
from tests.flow.deliveries import Deliveries
from tests.monitoring.conftest import Shop
from tests.waiting import eventually


def call_twice(
    shop: Shop, amount: int = 999, first: str = "first-id", duplicate: str = "duplicate-id"
) -> Record:
    """Executes a call and a duplicate with these task ids, and returns their record."""
    for task_id in (first, duplicate):
        shop.charge.apply((42, amount), task_id=task_id)
    wait_for_reference(shop, duplicate)
    record: Record = shop.charge.idempotency_record(42, amount)
    return record


def wait_for_reference(shop: Shop, task_id: str) -> None:
    eventually(lambda: shop.store.reference(task_id) is not None)


def refer(store: RecordStore, task_id: str, record: Record) -> None:
    """Stores that the message of `task_id` waits for the execution of a record."""
    store.refer(reference.command(store.config.prefix, task_id, record, "w", 60_000))
    eventually(lambda: store.reference(task_id) is not None)


def test_a_duplicate_is_found_without_a_scan_and_the_execution_by_one(shop: Shop) -> None:
    record = call_twice(shop, first="the first", duplicate="a duplicate")
    shop.client.config_resetstat()

    found = find_task(shop.stores, "a duplicate")

    assert isinstance(found, RecordView)
    assert found.record.token == record.token
    assert found.reference.task_id == "the first"
    assert "cmdstat_scan" not in shop.client.info("commandstats")
    found = find_task(shop.stores, "the first")
    assert isinstance(found, RecordView)
    assert found.reference is None
    assert find_task(shop.stores, "unknown") is None


def test_show_names_the_execution_that_answered_a_duplicate(shop: Shop) -> None:
    record = call_twice(shop)

    lines = shop.celery("show", "duplicate-id").splitlines()

    assert lines[0].split(maxsplit=1)[0] == "duplicate"
    assert "got the outcome of task first-id (attempt 1)" in lines[0]
    assert any(line.split() == ["key", record.key] for line in lines)


@pytest.mark.parametrize(
    ("policy", "amount", "end", "became"),
    [
        ("ignore", 999, "ignored", "was ignored, because of"),
        ("raise", 999, "conflict", "failed with ConflictError, because of"),
        ("reject", 999, "dead-lettered", "was rejected and dead-lettered, because of"),
        ("retry", 999, "waiting", "was put back until the end of"),
        ("wait", 999, "waiting", "was put back until the end of"),
        ("retry", 1_000, "other arguments", "failed with KeyReusedError: other arguments than"),
    ],
)
def test_show_has_what_became_of_a_duplicate(
    shop: Shop, policy: str, amount: int, end: str, became: str
) -> None:
    shop.app.conf.task_always_eager = False
    type(shop.charge).idempotency_on_conflict = policy
    key = shop.begin(shop.charge, 42, 999)
    deliveries = Deliveries(shop.app, shop.charge)
    deliveries.deliver(deliveries.publish(42, amount, task_id="duplicate-id"))
    wait_for_reference(shop, "duplicate-id")

    first = f"task task-of-{key.digest} (attempt 1)"
    assert f"{became} {first}" in shop.celery("show", "duplicate-id")
    duplicate = shop.json("show", "duplicate-id")["duplicate"]
    assert (duplicate["end"], duplicate["replayed"]) == (end, False)
    shop.client.delete(shop.store.name(key))
    assert f"duplicate-id {became} {first}, under" in shop.celery("show", "duplicate-id", code=1)


def test_a_duplicate_leads_to_a_record_that_cannot_be_read(shop: Shop) -> None:
    call_twice(shop)
    shop.client.set(f"idem:{shop.charge.idempotency_key_of(42, 999)}", "damaged", px=60_000)

    document = shop.json("show", "duplicate-id")

    assert document["state"] == "CORRUPT"
    assert document["duplicate"]["task_id"] == "first-id"


def test_a_duplicate_s_id_forgets_its_record(shop: Shop) -> None:
    record = call_twice(shop)

    assert len(shop.celery("list", "--json").splitlines()) == 1, "references are not records"
    assert shop.json("stats", "--timeout", "0")["tasks"]["shop.charge"]["records"] == 1
    forgotten = {"key": record.key, "case": "forgotten"}
    assert shop.json("forget", "duplicate-id", "--yes") == [forgotten]
    assert "which is absent now" in shop.celery("show", "duplicate-id", code=1)


class TestOutcomeOf:
    def test_a_replayed_error(self, shop: Shop) -> None:
        call_twice(shop, amount=13)

        outcome = outcome_of(shop.charge.AsyncResult("duplicate-id"))

        assert (outcome.replayed, outcome.task_id) == (True, "first-id")

    @pytest.mark.parametrize("task_id", ["first-id", "other-id"])
    def test_arguments_in_the_backend_lead_to_the_key(self, shop: Shop, task_id: str) -> None:
        shop.app.conf.update(result_extended=True, task_always_eager=False)
        shop.charge.store_eager_result = True
        shop.charge.apply((42,), {"amount": 999}, task_id="first-id")
        # Of a message whose call another one has executed, as far as its record shows.
        shop.charge.backend.store_result("other-id", None, "SUCCESS", request=_Request())

        outcome = outcome_of(AsyncResult(task_id, app=shop.app))

        record = shop.charge.idempotency_record(42, 999)
        expected = CallOutcome(record.key, False, "first-id", record.token, 1)
        assert outcome == (expected if task_id == "first-id" else None)

    def test_a_running_call_has_none(self, shop: Shop) -> None:
        key = shop.begin(shop.charge, 42, 999)
        record = shop.charge.idempotency_record(42, 999)

        assert outcome_of(AsyncResult(record.task_id, app=shop.app), key) is None


class _Request:
    """What the result backend stores of a request under ``result_extended``."""

    task = "shop.charge"
    args: tuple[Any, ...] = (42,)
    kwargs: dict[str, Any] = {"amount": 999}  # noqa: RUF012
    hostname = "celery@here"
    retries = 0


class TestKeyThatRunsAgain:
    """With ``idempotency_until="finished"`` each message has a record of its own."""

    @pytest.fixture(autouse=True)
    def executions(self, shop: Shop) -> None:
        """Two executions of one key; the key's record is of the second."""
        type(shop.pack).idempotency_until = "finished"
        type(shop.pack)._configurations = {}
        for task_id in ("first-id", "second-id"):
            shop.pack.apply((42, 3000), task_id=task_id)

    @pytest.mark.parametrize("task_id", ["first-id", "second-id"])
    def test_every_task_id_leads_to_its_own_record(self, shop: Shop, task_id: str) -> None:
        key, document = shop.pack.idempotency_key_of(42, 3000), shop.json("show", task_id)

        assert (document["task_id"], document["key"]) == (task_id, str(key))
        assert document["result"] == "x" * 3000
        outcome = outcome_of(AsyncResult(task_id, app=shop.app), key)
        assert (outcome.replayed, outcome.task_id) == (False, task_id)

    @pytest.mark.parametrize(
        "name", ["shop.chrage", f"shop.chrage:{'x' * 22}", "idem:shop.chrage:x"]
    )
    def test_a_mistyped_task_gets_the_nearest_name(self, shop: Shop, name: str) -> None:
        output = shop.celery("show", name, code=1)

        assert "did you mean shop.charge?" in output
        assert ("is not a task of this app" in output) == (":" not in name)
        assert "did you mean shop.charge?" in shop.celery("explain", "shop.chrage", code=1)
        assert "did you mean shop.charge?" in shop.celery("list", "--task", "shop.chrage")

    def test_a_mistyped_key_is_not_called_a_task_id(self, shop: Shop) -> None:
        assert shop.celery("show", f"shop.charge:{'x' * 22}", code=1).endswith("is absent\n")
        assert "shop.charge:xyz is not a key" in shop.celery("show", "shop.charge:xyz", code=1)

    def test_a_duplicate_that_ran_in_its_turn_leads_to_its_own_record(self, shop: Shop) -> None:
        store = shop.pack.idempotency_configuration.executor.store
        first = store.get(shop.pack.idempotency_key_of(42, 3000).of_message("first-id"))
        # As if it had met the first execution, before it ran.
        refer(store, "second-id", run_sync(first))
        shop.pack.apply((42, 3000), task_id="third-id")

        document = shop.json("show", "second-id")

        assert document["task_id"] == "second-id"
        assert "duplicate" not in document
        outcome = outcome_of(AsyncResult("second-id", app=shop.app))
        assert (outcome.replayed, outcome.task_id) == (False, "second-id")


def test_a_reference_to_a_task_of_another_app_is_none(shop: Shop) -> None:
    record = call_twice(shop)
    refer(shop.store, "lost-id", replace(record, key=record.key.replace("shop.", "other.")))

    assert outcome_of(AsyncResult("lost-id", app=shop.app)) is None
