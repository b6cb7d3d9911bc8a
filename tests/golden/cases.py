"""States of each kind: how this version leaves them, and what every later one does with them.

``python -m tests.golden.test_golden`` writes the states as this version stores them into the file
of its layout. Cases that a file has are never written again: each file is kept for ever.
tests/store/test_golden.py fixes the bytes that this version writes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from celery_idempotent import ConflictError, KeyReusedError, PoisonedTaskError, ResultNotStoredError
from celery_idempotent.core.record import Payload, State, layout, step_field, steps
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.commands import LeaseExtension
from tests.golden.shop import LONG_MS, VALUE, Shop
from tests.store.record_harness import FIRST, LEASE_MS, RETENTION_MS, SECOND, THIRD, Turn
from tests.waiting import eventually

FOLDER = Path(__file__).parent


class Case(NamedTuple):
    """A state. `kept` is a JSON value that is stored with it."""

    leave: Callable[[Shop], Any]
    #: Takes the shop with that state, and `kept`.
    check: Callable[[Shop, Any], None]


# An outcome


def call(name: str, **how: Any) -> Callable[[Shop], None]:
    def leave(shop: Shop) -> None:
        fails = how.get("amount", 0) < 0
        with pytest.raises(ValueError, match="1") if fails else nullcontext():
            shop.call(name, **how)

    return leave


def is_replayed(name: str, **how: Any) -> Callable[[Shop, Any], None]:
    def check(shop: Shop, kept: Any) -> None:
        assert shop.call(name, **how) == VALUE
        assert shop.runs == shop.steps == []
        assert shop.record(name).record().task_id

    return check


def is_replayed_and_forgotten(name: str) -> Callable[[Shop, Any], None]:
    def check(shop: Shop, kept: Any) -> None:
        is_replayed(name)(shop, kept)
        with pytest.raises(KeyReusedError):
            shop.call(name, amount=501)
        task = shop.tasks[name]
        assert task.idempotency_record("1", 500).result == VALUE

        assert task.idempotency_forget("1", 500) is True

        assert list((shop.folder / "objects").iterdir()) == []
        assert shop.call(name) == VALUE
        assert shop.runs == [1]

    return check


def error_is_replayed(name: str) -> Callable[[Shop, Any], None]:
    def check(shop: Shop, kept: Any) -> None:
        with pytest.raises(ValueError, match="1") as caught:
            shop.call(name, amount=-1)
        assert caught.value.args == ("1", -1)
        assert shop.runs == []

    return check


def value_is_not_stored(name: str) -> Callable[[Shop, Any], None]:
    def check(shop: Shop, kept: Any) -> None:
        with pytest.raises(ResultNotStoredError):
            shop.call(name)
        assert shop.runs == []

    return check


def label_is_read(shop: Shop, kept: Any) -> None:
    assert shop.tasks["charge"].idempotency_record("1", 500).label == "order 1"


def continue_(shop: Shop) -> None:
    record = shop.record("charge").sending(task_id=FIRST)
    shop.record("charge").mark_sent(record.token)


def is_continued(shop: Shop, kept: Any) -> None:
    assert shop.record("charge").begin(task_id=FIRST).case == "finished"
    assert shop.call("charge") == "charged"
    assert shop.runs == []


def complete_with(form: str, body: bytes) -> Callable[[Shop], None]:
    def leave(shop: Shop) -> None:
        record = shop.record("charge")
        assert record.complete(record.started().token, Payload(form, body)).case == "ok"

    return leave


def replace_with(form: str) -> Callable[[Shop], None]:
    def leave(shop: Shop) -> None:
        record = shop.record("charge")
        assert record.delegate(record.started().token, 3, form).case == "ok"

    return leave


def is_replaced(shop: Shop, kept: Any) -> None:
    record = shop.record("charge")
    assert record.begin(task_id=THIRD, generation=3).case == "finished"
    assert record.begin(task_id=FIRST, generation=2).case == "finished"
    assert layout.read_task_id(record.record().body) == SECOND
    assert record.begin(task_id=FIRST, generation=3).case == "begun"


def poison(shop: Shop) -> None:
    shop.record("charge").poisoned()


def is_poisoned(shop: Shop, kept: Any) -> None:
    with pytest.raises(PoisonedTaskError, match="1 times"):
        shop.call("charge")


# An execution


def begin(shop: Shop) -> None:
    shop.record("charge").started(lease_ms=LONG_MS)


def is_held(shop: Shop, kept: Any) -> None:
    record = shop.record("charge")
    with pytest.raises(ConflictError):
        shop.call("charge")
    token = record.record().token

    assert record.complete(token - 1).case == "lost"
    assert record.extend(token).case == "ok"
    assert record.now_ms() < record.record().at_ms <= record.now_ms() + LEASE_MS
    assert record.complete(token).case == "ok"
    assert shop.call("charge") == "charged"


def crash(name: str) -> Callable[[Shop], None]:
    """Begins, finishes a step and dies."""

    def leave(shop: Shop) -> None:
        record = shop.record(name)
        task = shop.tasks[name].idempotency_configuration
        token = record.started().token
        place = {"key": record.key, "token": token, "field": step_field("book")}
        encode = task.executor.codec.encode_result
        payload = run_sync(encode(["booked", "1"], task.settings, **place))
        entry = steps.write("book", *payload)
        save = commands.extend(LeaseExtension(record.key, token, LEASE_MS, RETENTION_MS), entry)
        assert run_sync(record.store.execute(save)).case == "ok"
        assert record.abandon().case == "ok"

    return leave


def is_taken_over(name: str) -> Callable[[Shop, Any], None]:
    def check(shop: Shop, kept: Any) -> None:
        old = shop.record(name).record()
        assert (old.state, old.attempt) == (State.STARTED, 1)

        assert shop.call(name) == VALUE

        assert (shop.runs, shop.steps) == ([2], [])
        assert shop.record(name).record().token > old.token

    return check


def take_over(shop: Shop) -> None:
    crash("charge")(shop)
    shop.record("charge").started(task_id=SECOND, lease_ms=LONG_MS)


def is_the_second_attempt(shop: Shop, kept: Any) -> None:
    record = shop.record("charge")
    assert (record.record().attempt, record.record().task_id) == (2, SECOND)
    assert record.release(record.record().token).case == "ok"
    assert shop.call("charge") == VALUE
    assert (shop.runs, shop.steps) == ([1], [])


# A reservation


def reserve(shop: Shop) -> None:
    shop.record("reserved").reserved(hold_ms=LONG_MS)


def is_published_once(shop: Shop, kept: Any) -> None:
    assert shop.tasks["reserved"].delay("1", 500).id == FIRST


def hold_for_retry(shop: Shop) -> None:
    record = shop.record("reserved")
    assert record.release(record.started().token, LONG_MS, generation=1).case == "ok"


def is_held_for_retry(shop: Shop, kept: Any) -> None:
    record = shop.record("reserved")
    with pytest.raises(ConflictError):
        shop.call("reserved", task_id=SECOND)
    assert record.begin(task_id=FIRST, generation=0).case == "held"
    assert record.begin(task_id=FIRST, generation=1).case == "begun"


# Keys that run again


def is_over(name: str) -> Callable[[Shop, Any], None]:
    """Copies of the message get its outcome, other calls run."""

    def check(shop: Shop, kept: Any) -> None:
        assert shop.call(name, task_id=FIRST) == VALUE
        assert shop.runs == []
        assert shop.call(name, task_id=SECOND) == VALUE
        assert shop.runs == [1]

    return check


def take_turn(shop: Shop) -> None:
    Turn(shop.record("finished")).first.started(lease_ms=LONG_MS)


def turn_is_held(shop: Shop, kept: Any) -> None:
    turn = Turn(shop.record("finished"))
    with pytest.raises(ConflictError):
        shop.call("finished", task_id=SECOND)
    assert turn.first.complete(turn.first.record().token).case == "ok"
    assert shop.call("finished", task_id=SECOND) == VALUE
    assert shop.call("finished", task_id=FIRST) == "charged"


def crash_in_turn(shop: Shop) -> None:
    turn = Turn(shop.record("finished"))
    turn.first.started()
    assert turn.first.abandon().case == "ok"


def turn_is_taken_over(shop: Shop, kept: Any) -> None:
    assert shop.call("finished", task_id=FIRST) == VALUE
    assert shop.runs == [2]


def wait_for_turn(shop: Shop) -> None:
    turn = Turn(shop.record("collapsed"), waits=True)
    turn.first.started(lease_ms=LONG_MS)
    turn.second.publish(hold_ms=LONG_MS)


def next_turn_is_reserved(shop: Shop, kept: Any) -> None:
    turn = Turn(shop.record("collapsed"), waits=True)
    assert turn.harness.slot().task_id == SECOND
    assert shop.tasks["collapsed"].delay("1", 500).id == SECOND
    assert turn.first.complete(turn.first.record().token).case == "ok"
    assert shop.call("collapsed", task_id=SECOND) == VALUE


# A database


def without_records(leave: Callable[[Shop], Any]) -> Callable[[Shop], None]:
    """Leaves the rows alone, as after a loss of Redis."""

    def leave_rows(shop: Shop) -> None:
        leave(shop)
        shop.redis.flushdb()

    return leave_rows


def rows_are_replayed(shop: Shop, kept: Any) -> None:
    assert shop.call("committed") == VALUE
    assert shop.runs == []
    with pytest.raises(KeyReusedError):
        shop.call("committed", amount=501)


# Duplicates


def refer(shop: Shop) -> None:
    shop.call("charge", task_id=FIRST)
    shop.call("charge", task_id=SECOND)
    eventually(lambda: shop.record("charge").store.reference(SECOND))


def is_referred_to(shop: Shop, kept: Any) -> None:
    record = shop.record("charge")
    found = record.store.reference(SECOND)
    assert (found.key, found.replayed, found.task_id) == (str(record.key), True, FIRST)
    assert found.token == record.record().token


def shared_check(*checks: Callable[[Shop, Any], None]) -> Callable[[Shop, Any], None]:
    def check(shop: Shop, kept: Any) -> None:
        for each in checks:
            each(shop, kept)

    return check


_KINDS = ("charge", "compressed", "encrypted", "offloaded", "everything")

CASES: dict[str, Case] = {
    **{f"a result: {n}": Case(call(n), is_replayed_and_forgotten(n)) for n in _KINDS},
    **{f"an error: {n}": Case(call(n, amount=-1), error_is_replayed(n)) for n in _KINDS},
    **{f"a crash after a step: {n}": Case(crash(n), is_taken_over(n)) for n in _KINDS},
    "a label": Case(call("charge"), label_is_read),
    "a result that is not stored": Case(call("fact"), value_is_not_stored("fact")),
    "a result that was too large": Case(
        complete_with("", b"it is larger than idempotency_max_result_size"),
        value_is_not_stored("charge"),
    ),
    "a result, continued": Case(continue_, is_continued),
    "the result of a replacement": Case(replace_with("=task"), is_replaced),
    "a replacement without result": Case(
        replace_with("=ignored"), shared_check(value_is_not_stored("charge"), is_replaced)
    ),
    "a poisoned call": Case(poison, is_poisoned),
    "an execution": Case(begin, is_held),
    "an execution that took over": Case(take_over, is_the_second_attempt),
    "a published call": Case(reserve, is_published_once),
    "a retry": Case(hold_for_retry, is_held_for_retry),
    "finished: a result": Case(call("finished", task_id=FIRST), is_over("finished")),
    "finished: an execution": Case(take_turn, turn_is_held),
    "finished: a crash": Case(crash_in_turn, turn_is_taken_over),
    "started: a result": Case(call("collapsed", task_id=FIRST), is_over("collapsed")),
    "started: a message waits": Case(wait_for_turn, next_turn_is_reserved),
    "a row": Case(without_records(call("committed")), rows_are_replayed),
    "a row of an error": Case(
        without_records(call("committed", amount=-1)), error_is_replayed("committed")
    ),
    "a row of a key that runs again": Case(
        without_records(call("committed_again", task_id=FIRST)), is_over("committed_again")
    ),
    "a reference": Case(refer, is_referred_to),
}
