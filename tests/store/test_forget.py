"""forget: an operator's word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.store.commands import UNREADABLE
from celery_idempotent.store.run_sync import run_sync
from tests.store.record_harness import FIRST, SECOND, WORKER, RecordHarness
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
def test_any_record_is_dropped(harness: RecordHarness, given: object) -> None:
    given(harness)  # type: ignore[operator]

    assert harness.forget().case == "ok"
    assert harness.raw is None
    assert harness.begin(task_id=SECOND).there.attempt == 1


def test_there_may_be_nothing(harness: RecordHarness) -> None:
    assert harness.forget().case == "absent"
    assert harness.forget(shown(17)).case == "absent"
    assert harness.forget(UNREADABLE).case == "absent"


def test_what_was_shown_is_told_by_its_token(harness: RecordHarness) -> None:
    done = harness.completed()

    for other in (done.token - 1, done.token + 1, 0):
        answer = harness.forget(replace(done, token=other))
        assert (answer.case, answer.record) == ("changed", done)
    assert harness.record() == done

    assert harness.forget(done).case == "ok"
    assert harness.raw is None


def test_a_lease_that_was_taken_over_since_is_not_dropped(harness: RecordHarness) -> None:
    dead = harness.expired()
    heir = harness.started()

    assert harness.forget(dead).case == "changed"
    assert harness.record() == heir


@pytest.mark.parametrize(
    "since", [RecordHarness.complete, RecordHarness.fail], ids=["completed", "failed"]
)
def test_an_outcome_that_was_not_shown_is_not_dropped(harness: RecordHarness, since: Any) -> None:
    running = harness.started()
    since(harness, running.token)
    outcome = harness.record()

    answer = harness.forget(running)

    assert outcome.token == running.token
    assert (answer.case, answer.record) == ("changed", outcome)
    assert harness.record() == outcome


def test_an_execution_that_was_not_shown_is_not_dropped(harness: RecordHarness) -> None:
    reserved = harness.reserved()
    harness.put(raw_record(b"S", token=reserved.token))

    assert harness.forget(reserved).case == "changed"
    assert harness.state is State.STARTED


@pytest.mark.parametrize("since", [
    lambda harness, running: harness.extend(running.token),
    lambda harness, running: harness.save_step(running.token),
], ids=["extended", "a step further"])  # fmt: skip
def test_an_execution_that_goes_on_is_still_what_was_shown(
    harness: RecordHarness, since: Any
) -> None:
    running = harness.started()
    since(harness, running)

    assert harness.forget(running).case == "ok"
    assert harness.raw is None


@pytest.mark.parametrize(
    "given", [RecordHarness.completed, RecordHarness.failed], ids=["completed", "failed"]
)
def test_so_is_an_outcome_whose_continuation_has_gone_out(
    harness: RecordHarness, given: Any
) -> None:
    outcome = given(harness)
    assert harness.mark_continued(outcome.task_id).case == "ok"

    assert harness.forget(outcome).case == "ok"
    assert harness.raw is None


def test_what_was_damaged_is_not_dropped_once_it_can_be_read(harness: RecordHarness) -> None:
    done = harness.completed()

    answer = harness.forget(UNREADABLE)

    assert (answer.case, answer.record) == ("changed", done)
    assert harness.record() == done


class TestErrorsOfEndedTaskIds:
    """To all but copies of their messages there is nothing."""

    def test_are_dropped_as_if_they_were_not_there(self, harness: RecordHarness) -> None:
        harness.end_with_error(harness.started().token)
        assert harness.begin().case == "finished"

        assert harness.forget().case == "absent"
        assert harness.raw is None
        assert harness.begin().case == "begun"

    def test_are_not_what_was_shown(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.end_with_error(running.token)

        assert harness.forget(running).case == "absent"
        assert harness.forget(UNREADABLE).case == "absent"
        assert harness.begin().case == "finished"


def test_what_cannot_be_read_is_dropped(harness: RecordHarness) -> None:
    for raw in (b"", b"S", b"Znewer", b"{}"):
        harness.put(raw)
        assert harness.forget().case == "ok"
        assert harness.raw is None
        harness.put(raw)
        assert harness.forget(UNREADABLE).case == "ok"
        assert harness.raw is None


def test_what_cannot_be_read_is_no_tokens(harness: RecordHarness) -> None:
    for raw in (b"", b"S", b"Znewer"):
        harness.put(raw)
        assert (
            run_sync(harness.store.execute(commands.forget(harness.key, shown(17)))).case
            == "changed"
        )
        assert harness.raw == raw


def test_another_kind_of_value_is_dropped_too(harness: RecordHarness) -> None:
    harness.client.rpush(harness.name, "no record")
    harness.client.expire(harness.name, 60)

    with pytest.raises(CorruptRecordError):
        harness.forget(shown(17))
    assert harness.forget(UNREADABLE).case == "ok"
    assert not harness.client.exists(harness.name)

    harness.client.rpush(harness.name, "no record")
    assert harness.forget().case == "ok"
    assert not harness.client.exists(harness.name)


def test_an_execution_under_way_is_refused_its_outcome(harness: RecordHarness) -> None:
    running = harness.started()

    harness.forget()

    assert harness.complete(running.token).case == "lost"
    assert harness.begin(task_id=FIRST).token > running.token
