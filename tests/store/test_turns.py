"""Messages of one key: where it may run again, one at a time has the turn; errors of one message.

`test_table` compares each call with the model; here are the promises in examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import default_root
from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from celery_idempotent.store import commands
from celery_idempotent.store.inspection import scan
from celery_idempotent.store.run_sync import run_sync
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    HOLD_MS,
    LEASE_MS,
    OTHER_ARGUMENTS,
    OWNER,
    RESULT,
    RETENTION_MS,
    SECOND,
    THIRD,
    RecordHarness,
    Turn,
)


@pytest.fixture
def turn(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="finished"``."""
    return Turn(harness)


@pytest.fixture
def collapsing(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="started"``."""
    return Turn(harness, waits=True)


@pytest.mark.core
def test_the_next_message_runs_after_the_end_and_copies_replay(turn: Turn) -> None:
    for message in (turn.first, turn.second, turn.third):
        running = message.started()
        for other in (turn.first, turn.second, turn.third):
            if other.raw is None:
                assert other.begin().case == "busy"
        payload = Payload("json", message.task_id.encode())
        assert message.complete(running.token, payload).case == "ok"
        assert turn.harness.record() == message.record(), "the turn shows the last outcome"
        for record in (turn.harness, message):
            assert RETENTION_MS - 5000 < record.left_ms() <= RETENTION_MS

    for message in (turn.first, turn.second, turn.third):
        copy = message.begin()
        assert (copy.case, copy.stored.body) == ("finished", message.task_id.encode())
        assert copy.stored.task_id == message.task_id


@pytest.mark.parametrize("generation", [0, 1])
def test_copies_get_the_error_that_ended_their_message(turn: Turn, generation: int) -> None:
    token = turn.first.started(generation=generation).token
    assert turn.first.end_with_error(token, generation=generation).case == "ok"

    assert turn.state is None
    name = turn.first.store.name(turn.first.key.entry(default_root(FIRST)))
    assert ERROR_MS - 5000 < turn.first.client.pttl(name) <= ERROR_MS
    for older in range(generation + 1):
        copy = turn.first.begin(generation=older)
        assert (copy.case, copy.stored.body) == ("sent", ERROR.body)
    assert turn.first.begin(generation=generation + 1).case == "begun"
    assert turn.second.begin().case == "busy"


class TestTakeover:
    def test_by_another_message_and_the_dead_one_comes_back(self, turn: Turn) -> None:
        dead = turn.first.expired()

        running = turn.second.started()

        assert running.token > dead.token
        assert turn.first.begin().case == "later"
        turn.second.complete(running.token)
        again = turn.first.started()
        assert again.attempt == 2
        assert turn.harness.record().token == again.token

    @pytest.mark.parametrize("end", ["complete", "fail", "end_with_error", "extend", "save_step"])
    def test_refuses_the_stale_execution(self, turn: Turn, end: str) -> None:
        stale = turn.first.expired()
        running = turn.second.started()

        reply = getattr(turn.first, end)(stale.token)

        assert (reply.case, reply.stored.task_id) == ("lost", FIRST)
        assert not reply.stored.state.finished
        assert turn.harness.record() == running
        turn.second.complete(running.token)
        reply = getattr(turn.first, end)(stale.token)
        assert (reply.case, reply.stored.task_id) == ("lost", FIRST)
        assert turn.first.begin().case == "begun"

    def test_keeps_the_steps_of_each_message(self, turn: Turn) -> None:
        turn.first.save_step(turn.first.started().token)
        turn.first.abandon()
        running = turn.second.started()
        assert running.body == b""
        turn.second.complete(running.token)

        turn.first.started()

        assert turn.first.steps == {"reserve": ("json", b'"r-1"')}


class TestRetry:
    def test_the_turn_stays_reserved_for_it(self, turn: Turn) -> None:
        token = turn.first.started().token
        assert turn.first.release(token, HOLD_MS, generation=1).case == "ok"

        assert (turn.state, turn.holder) == (State.RESERVED, FIRST)
        assert turn.second.begin().case == "busy"
        assert turn.first.begin(generation=0).case == "held"
        assert turn.first.begin(generation=1).case == "begun"


def test_a_forgotten_turn_is_free_and_the_execution_is_refused(turn: Turn) -> None:
    token = turn.first.started().token
    assert turn.harness.forget().case == "ok"

    for reply in (turn.first.complete(token), turn.first.end_with_error(token)):
        assert (reply.case, reply.record) == ("lost", None)
    assert turn.second.begin().case == "begun"
    assert turn.first.complete(token).case == "lost"


class TestPublishing:
    def test_reserves_a_free_turn(self, turn: Turn) -> None:
        assert turn.first.publish().case == turn.first.publish().case == "reserved"

        assert (turn.state, turn.holder) == (State.RESERVED, FIRST)
        assert HOLD_MS - 5000 < turn.harness.left_ms() <= HOLD_MS
        assert turn.second.publish().stored.task_id == FIRST
        assert turn.second.begin().case == "busy"
        turn.second.give_back()
        assert turn.holder == FIRST
        token = turn.first.started().token
        assert turn.second.publish()[:2] == ("held", turn.harness.record())
        turn.first.complete(token)
        assert turn.second.publish().case == "reserved"
        turn.second.give_back()
        assert turn.state is None

    def test_of_a_task_id_that_has_ended_runs_anew(self, turn: Turn) -> None:
        outcome = turn.first.completed()

        assert turn.first.publish().case == "reserved"
        anew = turn.first.begin(root=b"another!")
        assert anew.case == "begun"
        copy = turn.first.begin()
        assert (copy.case, copy.stored.token) == ("sent", outcome.token)
        assert turn.first.complete(anew.token, Payload("json", b"2")).case == "ok"
        assert turn.first.begin(root=b"another!").stored.body == b"2"
        assert turn.first.begin().stored.body == outcome.body


class TestCollapsing:
    @pytest.mark.core
    @pytest.mark.parametrize("end", ["complete", "fail", "release", "end_with_error"])
    def test_one_runs_one_waits_and_the_others_get_the_waiting_one(
        self, collapsing: Turn, end: str
    ) -> None:
        collapsing.first.publish()
        assert collapsing.third.publish().stored.task_id == FIRST
        token = collapsing.first.started().token

        assert collapsing.second.publish().case == "reserved"
        reply = collapsing.third.publish()

        assert (reply.case, reply.stored.task_id) == ("held", SECOND)
        assert reply.stored.state is State.RESERVED
        assert collapsing.waits
        running = collapsing.harness.record()
        assert steps.read(running.body, "key") == {}, "it is not taken for a step"
        assert getattr(collapsing.first, end)(token).case == "ok"
        assert (collapsing.state, collapsing.holder) == (State.RESERVED, SECOND)
        assert HOLD_MS - 5000 < collapsing.harness.left_ms() <= HOLD_MS
        assert collapsing.third.begin().case == "busy"
        assert collapsing.second.begin().case == "begun"
        assert not collapsing.waits

    def test_the_reservation_is_kept_over_a_retry_a_crash_and_a_heartbeat(
        self, collapsing: Turn
    ) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish()
        collapsing.first.extend(token)
        collapsing.first.save_step(token)
        collapsing.first.release(token, HOLD_MS, generation=1)
        assert collapsing.third.publish().stored.task_id == SECOND
        assert collapsing.second.begin().case == "later"
        collapsing.first.started(generation=1)
        collapsing.first.abandon()
        token = collapsing.first.started(generation=1).token

        assert collapsing.third.publish().stored.task_id == SECOND
        collapsing.first.complete(token)
        assert collapsing.holder == SECOND

    def test_a_reservation_that_is_given_back_makes_room(self, collapsing: Turn) -> None:
        token = collapsing.first.started().token
        collapsing.second.publish()
        collapsing.second.give_back()
        assert not collapsing.waits
        assert collapsing.third.publish().case == "reserved"
        collapsing.first.release(token, HOLD_MS, generation=1)

        collapsing.first.give_back()  # a retry that is discarded

        assert collapsing.holder == THIRD


class TestChangingTheMode:
    """A key that `idempotency_until` was changed for, while its messages are under way."""

    def test_a_running_execution_keeps_the_turn(self, turn: Turn) -> None:
        running = turn.harness.started()

        assert turn.first.begin().case == "busy"
        assert turn.second.begin().case == "busy"
        assert turn.harness.complete(running.token).case == "ok"
        assert turn.second.begin().case == "begun"

    def test_a_message_that_had_ended_does_not_run_again(self, turn: Turn) -> None:
        turn.harness.completed(task_id=FIRST)

        reply = turn.first.begin()

        assert (reply.case, reply.stored.body) == ("finished", RESULT.body)

    def test_back_to_one_outcome_the_last_one_replays(self, turn: Turn) -> None:
        turn.first.completed()
        turn.second.completed()

        assert turn.harness.begin(task_id=THIRD).stored.task_id == SECOND


def test_a_damaged_turn_is_corrupt(turn: Turn) -> None:
    turn.harness.put(b"damage")

    reserve = commands.reserve(turn.first.key, FIRST, HOLD_MS)
    reply = run_sync(turn.harness.store.execute(reserve))
    assert (reply.case, reply.raw) == ("corrupt", b"damage")
    calls: list[Callable[[], object]] = [turn.first.begin, turn.second.begin]
    for call in calls:
        with pytest.raises(CorruptRecordError):
            call()  # its reply has the damaged bytes
    assert turn.first.raw is None


#: Another execution id.
THIS = b"another!"
LATE = Payload("json", b'{"exc_type": "TimeoutError"}')


def by_release(harness: RecordHarness) -> None:
    harness.end_with_error(harness.started().token)


def by_a_death(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon(error=ERROR)


either = pytest.mark.parametrize("ended", [by_release, by_a_death], ids=lambda how: how.__name__)


@pytest.mark.core
@either
def test_copies_of_a_message_get_its_error_whatever_other_messages_do(
    harness: RecordHarness, ended: Any
) -> None:
    ended(harness)
    before, name = harness.raw, harness.store.name(harness.key.entry(default_root(FIRST)))

    reply = harness.begin()

    assert (reply.case, reply.stored.state, reply.stored.task_id) == ("sent", State.FAILED, FIRST)
    assert (reply.stored.format, reply.stored.body) == ERROR
    assert harness.raw == before
    assert ERROR_MS - 5000 < harness.client.pttl(name) <= ERROR_MS
    assert scan.key_of_name(name, harness.store.config.prefix) is None, "no record of its own"
    assert run_sync(harness.store.get(harness.key)) is None
    successor = harness.started(task_id=SECOND)
    assert harness.begin().stored.body == ERROR.body
    harness.end_with_error(successor.token, LATE, task_id=SECOND)
    assert harness.begin(task_id=SECOND).stored.body == LATE.body
    assert harness.begin(root=b"another!").case == "begun", "a second publish of the task id"
    harness.complete(harness.record().token)
    assert harness.begin().stored.body == ERROR.body
    assert harness.begin(task_id=THIRD).stored.state is State.COMPLETED


@pytest.mark.core
def test_a_copy_sends_the_errbacks_if_their_sender_has_died(harness: RecordHarness) -> None:
    running = harness.started(execution_id=OWNER, continues=True)
    harness.end_with_error(running.token, sending_ms=LEASE_MS)
    harness.started(task_id=SECOND)

    assert harness.begin(continues=True).case == "held"
    harness.abandon()
    assert harness.begin(execution_id=THIS, continues=True).case == "finished"
    assert harness.begin(continues=True).case == "held"
    assert harness.mark_continued().case == "lost"
    assert harness.mark_continued(THIS).case == harness.mark_continued(THIS).case == "ok"
    assert harness.begin(continues=True).case == "sent"


@pytest.mark.core
def test_finished_steps_stay_after_an_error_for_the_next_execution(harness: RecordHarness) -> None:
    running = harness.started()
    harness.save_step(running.token)
    harness.end_with_error(running.token)

    assert harness.state is State.RESERVED
    assert RETENTION_MS - 5000 < harness.left_ms() <= RETENTION_MS
    assert harness.begin().case == "sent"
    assert harness.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "reused"
    successor = harness.started(task_id=SECOND)
    harness.save_step(successor.token, "ship", b"2")
    assert harness.steps == {"reserve": ("json", b'"r-1"'), "ship": ("json", b"2")}


@pytest.mark.core
def test_a_damaged_entry_of_an_error_is_corrupt(harness: RecordHarness) -> None:
    name = harness.store.name(harness.key.entry(default_root(FIRST)))
    harness.client.set(name, "damaged", px=RETENTION_MS)

    with pytest.raises(CorruptRecordError):
        harness.begin()
