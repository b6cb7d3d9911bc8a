"""``idempotency_shadow``: every call runs, and what would have become of it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent import State
from celery_idempotent.operations.calls.statistics import double_executions
from celery_idempotent.operations.worker.inspect_commands import ask
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import (
    EXITS,
    OutOfStockError,
    charge,
    collapsed,
    final,
    flaky,
    frail,
    leaving,
    misruled,
    pack,
    reserved,
    try_later,
    waiting,
)

#: The signals of calls that are not in shadow.
REAL = (
    *("begun", "taken_over", "completed", "failed", "released", "replayed", "conflicted"),
    *("lease_lost", "outcome_unsaved"),
)


SHOP = {"idempotency_shadow": True}


@pytest.fixture(autouse=True)
def leaves_no_real_record(shop: Shop) -> Iterator[None]:
    """Whatever a call in shadow does, the real records stay untouched."""
    yield
    assert list(shop.redis.scan_iter("idem:*")) == []


def decisions(ledger: Ledger, task_id: str) -> list[str]:
    """Returns the decisions in shadow about a message, in order."""
    assert ledger.signals(task_id, *REAL) == []
    return [received.name for received in ledger.signals(task_id)]


def refusal(ledger: Ledger, task_id: str) -> dict[str, Any]:
    """Returns the details of the only signal, a refusal."""
    (received,) = ledger.signals(task_id)
    assert received.name == "would_refuse"
    return received.details


@pytest.mark.core
def test_duplicate_runs_and_is_counted_as_a_replay(shop: Shop, ledger: Ledger, order: str) -> None:
    first, duplicate = pack.delay(order), None
    receipt = first.get(timeout=SOON)
    record = eventually(lambda: pack.idempotency_record(order), "the record")
    duplicate = pack.delay(order)

    assert duplicate.get(timeout=SOON) != receipt
    assert decisions(ledger, first.id) == ["would_run"]
    (received,) = ledger.signals(duplicate.id)
    assert received.name == "would_replay"
    assert received.details["record"]["task_id"] == first.id
    for run in ledger.runs(order):
        assert (run.key, run.protected) == (str(pack.idempotency_key_of(order)), False)
        assert (run.token, run.attempt, run.recovered) == (0, 1, False)
    assert len(ledger.runs(order)) == 2
    # The record holds the fact only.
    assert (record.state, record.format) == (State.COMPLETED, "")
    (name,) = shop.redis.scan_iter(f"idem-shadow:{record.key}")
    assert receipt["receipt"].encode() not in shop.redis.get(name)


def test_duplicate_runs_at_once_during_the_first_execution(ledger: Ledger, order: str) -> None:
    first = ledger.start(pack, order)
    duplicate, copy = pack.delay(order), pack.apply_async((order,), task_id=first.id)
    ledger.wait_for_run(order, number=3)
    ledger.release(order)

    receipts = [result.get(timeout=SOON)["receipt"] for result in (first, duplicate)]
    assert len(set(receipts)) == 2
    eventually(lambda: all(run.end for run in ledger.runs(order)), "all have returned")
    assert copy.id == first.id
    assert decisions(ledger, duplicate.id) == ["would_conflict"]
    assert decisions(ledger, first.id) == ["would_run", "would_conflict"]
    _, copy_signal = ledger.signals(first.id)
    assert copy_signal.details["policy"] == "retry"


def test_deduplicated_call_is_published_and_counted_once(
    ledger: Ledger, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ledger.hold(order)
    first, duplicate = reserved.delay(order), reserved.delay(order)
    ledger.wait_for_run(order, number=2)
    ledger.release(order)

    assert duplicate.id != first.id
    assert first.get(timeout=SOON) != duplicate.get(timeout=SOON)
    assert decisions(ledger, first.id) == ["would_run"]
    assert decisions(ledger, duplicate.id) == ["would_deduplicate"]
    _, run = sorted(ledger.runs(order), key=lambda run: run.task_id == duplicate.id)
    assert run.key == str(reserved.idempotency_key_of(order))

    # A call with the task id of its caller would have been published without shadow.
    assert reserved.apply_async((order,), task_id=f"own {order}").get(timeout=SOON)
    logged = [each for each in caplog.records if "it would not have been" in each.message]
    assert [vars(each)["idempotency_task_id"] for each in logged] == [duplicate.id]


def test_mark_of_a_forwarded_message_is_ignored(ledger: Ledger, order: str) -> None:
    headers = {"idempotency_shadow": "deduplicated of-another-task"}
    result = pack.apply_async((order,), headers=headers)

    assert result.get(timeout=SOON)
    assert decisions(ledger, result.id) == ["would_run"]


@pytest.mark.parametrize("key", ["", object(), ["a", ""], "x" * 1000])
def test_unusable_key_is_refused_in_the_count_only(ledger: Ledger, order: str, key: object) -> None:
    call = pack.s(order).set(idempotency_key=key)
    for result in (pack.apply_async((order,), idempotency_key=key), call.apply_async()):
        assert result.get(timeout=SOON)["receipt"]
        assert refusal(ledger, result.id)["reason"] == "key_rule"


def test_other_arguments_are_refused_in_the_count_only(ledger: Ledger, order: str) -> None:
    charge.delay(order, amount=1).get(timeout=SOON)
    result = charge.delay(order, amount=2)

    assert result.get(timeout=SOON)["amount"] == 2
    details = refusal(ledger, result.id)
    assert (details["reason"], details["error"][0]) == ("reused", "KeyReusedError")


@pytest.mark.parametrize("fault", ["raises", "none", "object", "nan"])
def test_bad_key_rule_is_refused_in_the_count_only(ledger: Ledger, order: str, fault: str) -> None:
    result = misruled.delay(fault, order)

    assert result.get(timeout=SOON)
    details = refusal(ledger, result.id)
    assert (details["reason"], details["key"]) == ("key_rule", "")


@pytest.mark.parametrize("damage", ["set", "lpush"], ids=["damaged", "of another type"])
def test_unreadable_one_is_refused_in_the_count_only(shop: Shop, order: str, damage: str) -> None:
    getattr(shop.redis, damage)(f"idem-shadow:{pack.idempotency_key_of(order)}", b"?")

    result = pack.delay(order)
    assert result.get(timeout=SOON)
    assert refusal(shop.ledger, result.id)["reason"] == "corrupt"


def test_error_reaches_the_caller_and_frees_the_key(ledger: Ledger, order: str) -> None:
    failed = flaky.delay(order, times=1)
    with pytest.raises(OutOfStockError):
        failed.get(timeout=SOON)
    again, copy = flaky.delay(order, times=1), None

    assert again.get(timeout=SOON) == "found one"
    assert decisions(ledger, again.id) == ["would_run"]
    copy = flaky.apply_async((order,), {"times": 1}, task_id=failed.id)
    ledger.wait_for_signal(copy.id, "would_replay")


def test_error_that_ends_the_key_is_counted_as_a_replay(ledger: Ledger, order: str) -> None:
    for number in range(2):
        result = final.delay(order, times=1)
        if number == 0:
            with pytest.raises(OutOfStockError):
                result.get(timeout=SOON)
    assert result.get(timeout=SOON) == "found one"
    assert decisions(ledger, result.id) == ["would_replay"]


def test_retry_runs_and_holds_the_key(ledger: Ledger, order: str) -> None:
    result = try_later.delay(order, countdown=1)
    eventually(lambda: ledger.runs(order) and ledger.runs(order)[0].end, "it has retried")
    duplicate = try_later.delay(order, countdown=1)

    assert result.get(timeout=SOON)
    assert duplicate.get(timeout=SOON)
    assert decisions(ledger, result.id) == ["would_run", "would_run"]
    assert decisions(ledger, duplicate.id)[0] == "would_conflict"


@pytest.mark.parametrize("way", sorted(EXITS.keys() - {"SystemExit", "KeyboardInterrupt"}))
def test_ends_as_in_plain_celery(shop: Shop, ledger: Ledger, order: str, way: str) -> None:
    result = leaving.delay(order, way)
    run = ledger.wait_for_run(order)
    if way == "requeue":
        assert result.get(timeout=SOON) == "back"
    eventually(lambda: ledger.runs(order)[0].end, "the first execution has ended")
    shop.wait_until_empty()

    assert run.task_id == result.id
    passes = 2 if way == "requeue" else 1
    assert decisions(ledger, result.id) == ["would_run"] * passes


@pytest.mark.parametrize(
    ("task", "decision", "reason"),
    [(pack, "would_take_over", None), (frail, "would_refuse", "poisoned")],
)
def test_crash_runs_again_and_is_counted(
    ledger: Ledger, order: str, task: Any, decision: str, reason: str | None
) -> None:
    result = ledger.start(task, order)
    ledger.kill(order)
    ledger.wait_for_run(order, number=2)
    ledger.release(order)

    assert result.get(timeout=SOON)["receipt"]
    assert decisions(ledger, result.id) == ["would_run", decision]
    assert ledger.signals(result.id)[1].details.get("reason") == reason
    assert [run.attempt for run in ledger.runs(order)] == [1, 1]


def test_burst_is_counted_as_it_would_be_collapsed(ledger: Ledger, order: str) -> None:
    running = ledger.start(collapsed, order)
    burst = [collapsed.delay(order) for _ in range(3)]
    ledger.wait_for_run(order, number=4)
    ledger.release(order)
    for result in (running, *burst):
        result.get(timeout=SOON)

    def ended() -> bool:
        record = collapsed.idempotency_record(order)
        return record is None or record.state is State.COMPLETED

    eventually(ended, "no call waits any more")
    later = collapsed.delay(order)

    assert later.get(timeout=SOON)
    first, *others = [decisions(ledger, each.id) for each in burst]
    assert (first, others) == (["would_wait"], [["would_deduplicate"]] * 2)
    assert decisions(ledger, later.id) == ["would_run"]


@pytest.mark.exhaustive
def test_worker_counts_by_task(shop: Shop, order: str) -> None:
    for result in [waiting.delay(order) for _ in range(3)]:
        result.get(timeout=SOON)

    totals = ask(shop.app, timeout=5.0).totals
    counter = totals["shop.waiting"]
    assert counter.pop("would_run") == 1
    assert counter.keys() <= {"would_replay", "would_conflict"}
    assert double_executions(counter) == sum(counter.values()) == 2
