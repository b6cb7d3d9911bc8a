"""forget: an operator deletes a record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import UNREADABLE
from celery_idempotent.store.run_sync import run_sync
from tests.store.record_harness import ERROR, FIRST, SECOND, WORKER, RecordHarness
from tests.unit.record.raw import raw_record


def shown(token: int) -> Record:
    return Record(State.STARTED, "shop.charge:digest", "shop.charge", FIRST, WORKER, token, 1)


@pytest.mark.parametrize(
    "given",
    [
        RecordHarness.started,
        RecordHarness.expired,
        RecordHarness.reserved,
        RecordHarness.held_for_retry,
        RecordHarness.completed,
        RecordHarness.failed,
        RecordHarness.poisoned,
    ],
    ids=lambda given: given.__name__,
)
def test_any_record_is_deleted(harness: RecordHarness, given: object) -> None:
    given(harness)  # type: ignore[operator]

    assert harness.forget().case == "ok"
    assert harness.raw is None
    assert harness.begin(task_id=SECOND).stored.attempt == 1


def test_an_absent_key_is_reported(harness: RecordHarness) -> None:
    assert harness.forget().case == "absent"
    assert harness.forget(shown(17)).case == "absent"
    assert harness.forget(UNREADABLE).case == "absent"


def test_a_shown_record_is_recognised_by_its_token(harness: RecordHarness) -> None:
    done = harness.completed()

    for other in (done.token - 1, done.token + 1, 0):
        reply = harness.forget(replace(done, token=other))
        assert (reply.case, reply.record) == ("changed", done)
    assert harness.record() == done

    assert harness.forget(done).case == "ok"
    assert harness.raw is None


def test_an_execution_that_took_over_since_is_not_deleted(harness: RecordHarness) -> None:
    dead = harness.expired()
    successor = harness.started()

    assert harness.forget(dead).case == "changed"
    assert harness.record() == successor


@pytest.mark.parametrize(
    "since", [RecordHarness.complete, RecordHarness.fail], ids=["completed", "failed"]
)
def test_an_outcome_that_was_not_shown_is_not_deleted(harness: RecordHarness, since: Any) -> None:
    running = harness.started()
    since(harness, running.token)
    outcome = harness.record()

    reply = harness.forget(running)

    assert outcome.token == running.token
    assert (reply.case, reply.record) == ("changed", outcome)
    assert harness.record() == outcome


def test_an_execution_that_was_not_shown_is_not_deleted(harness: RecordHarness) -> None:
    reserved = harness.reserved()
    harness.put(raw_record(b"S", token=reserved.token))

    assert harness.forget(reserved).case == "changed"
    assert harness.state is State.STARTED


@pytest.mark.parametrize("since", [
    lambda harness, running: harness.extend(running.token),
    lambda harness, running: harness.save_step(running.token),
], ids=["extended", "a step further"])  # fmt: skip
def test_a_shown_execution_is_deleted_after_an_extension(
    harness: RecordHarness, since: Any
) -> None:
    running = harness.started()
    since(harness, running)

    assert harness.forget(running).case == "ok"
    assert harness.raw is None


@pytest.mark.parametrize(
    "given", [RecordHarness.sending, RecordHarness.sending_error], ids=["completed", "failed"]
)
def test_a_shown_outcome_is_deleted_after_its_continuation_was_sent(
    harness: RecordHarness, given: Any
) -> None:
    outcome = given(harness)
    assert harness.mark_continued().case == "ok"

    assert harness.forget(outcome).case == "ok"
    assert harness.raw is None


def test_a_record_that_replaced_a_damaged_one_is_not_deleted(harness: RecordHarness) -> None:
    done = harness.completed()

    reply = harness.forget(UNREADABLE)

    assert (reply.case, reply.record) == ("changed", done)
    assert harness.record() == done


class TestEntries:
    """Of messages that have ended: an operator does not reach them."""

    def test_stay_after_the_key_is_forgotten(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.end_with_error(running.token)

        assert harness.forget().case == "absent"
        assert harness.forget(running).case == "absent"
        assert harness.begin().case == "sent"


def test_attempts_of_a_death_are_deleted_but_reported_as_absent(harness: RecordHarness) -> None:
    running = harness.started()
    harness.abandon(error=ERROR)

    assert harness.forget(running).case == harness.forget(UNREADABLE).case == "absent"
    assert harness.raw is not None
    assert harness.forget().case == "absent"
    assert harness.raw is None


def test_an_unreadable_record_is_deleted(harness: RecordHarness) -> None:
    for raw in (b"", b"S", b"Znewer", b"{}"):
        harness.put(raw)
        assert harness.forget().case == "ok"
        assert harness.raw is None
        harness.put(raw)
        assert harness.forget(UNREADABLE).case == "ok"
        assert harness.raw is None


def test_an_unreadable_record_has_no_token(harness: RecordHarness) -> None:
    for raw in (b"", b"S", b"Znewer"):
        harness.put(raw)
        assert (
            run_sync(harness.store.execute(commands.forget(harness.key, shown(17)))).case
            == "changed"
        )
        assert harness.raw == raw


def test_a_value_of_another_type_is_deleted(harness: RecordHarness) -> None:
    harness.client.rpush(harness.name, "no record")
    harness.client.expire(harness.name, 60)

    with pytest.raises(CorruptRecordError):
        harness.forget(shown(17))
    assert harness.forget(UNREADABLE).case == "ok"
    assert not harness.client.exists(harness.name)

    harness.client.rpush(harness.name, "no record")
    assert harness.forget().case == "ok"
    assert not harness.client.exists(harness.name)


def test_a_forgotten_execution_cannot_complete(harness: RecordHarness) -> None:
    running = harness.started()

    harness.forget()

    assert harness.complete(running.token).case == "lost"
    assert harness.begin(task_id=FIRST).token > running.token
