"""Messages of one key: where it may run again, one at a time holds it, and one more may wait.

labs/verification searches the protocol; here are the promises in examples.
"""

from __future__ import annotations

import pytest

from celery_idempotent.core.record import Payload, State, layout
from celery_idempotent.core.store import commands, run_sync
from tests.store.record_harness import (
    FIRST,
    HOLD_MS,
    LEASE_MS,
    RETENTION_MS,
    SECOND,
    SHORT_MS,
    RecordHarness,
    Turn,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core


@pytest.fixture
def turn(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="finished"``."""
    return Turn(harness)


@pytest.fixture
def collapsing(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="started"``."""
    return Turn(harness, waits=True)


def test_the_next_message_runs_after_the_end_and_copies_replay(turn: Turn) -> None:
    tokens = []
    for message in (turn.first, turn.second, turn.third):
        tokens.append(message.started().token)
        for other in (turn.first, turn.second, turn.third):
            if other.raw is None:
                assert other.begin().stored.task_id == message.task_id
        payload = Payload("json", message.task_id.encode())
        assert message.complete(tokens[-1], payload).case == "ok"
        assert turn.shown.token == tokens[-1], "the key shows the last outcome"
        assert RETENTION_MS - 5000 < message.left_ms() <= RETENTION_MS

    assert tokens == sorted(set(tokens))
    for message in (turn.first, turn.second, turn.third):
        copy = message.begin()
        assert (copy.case, copy.stored.body) == ("finished", message.task_id.encode())


class TestTakeover:
    def test_by_another_message_and_the_dead_one_comes_back(self, turn: Turn) -> None:
        turn.first.started()
        turn.first.save_step(turn.first.record().token)
        assert turn.first.abandon().case == "ok"

        running = turn.second.started()

        assert running.attempt == 1
        assert turn.first.begin().case == "wait"
        turn.second.complete(running.token)
        assert turn.first.started().attempt == 2
        assert "reserve" in turn.first.steps

    def test_refuses_the_stale_execution(self, turn: Turn) -> None:
        stale = turn.first.started(lease_ms=SHORT_MS)
        eventually(lambda: turn.second.begin(lease_ms=SHORT_MS).case == "begun")
        for end in ("complete", "fail", "extend", "save_step", "release"):
            assert getattr(turn.first, end)(stale.token).case == "lost"

        assert turn.first.state is State.STARTED


class TestRetry:
    def test_holds_the_key(self, turn: Turn) -> None:
        turn.first.release(turn.first.started().token, HOLD_MS, generation=1)

        assert turn.second.begin().case == "held"
        assert turn.first.begin().case == "wait"
        assert turn.first.begin(generation=1).case == "begun"

    def test_keeps_the_turn_until_then(self, turn: Turn) -> None:
        long_ms = 10 * (LEASE_MS + RETENTION_MS)
        turn.first.release(turn.first.started().token, long_ms, generation=1)

        assert turn.harness.left_ms() > long_ms - 5000


class TestPublish:
    def test_reserves_the_key_for_one_message(self, turn: Turn) -> None:
        assert turn.first.publish().case == "reserved"
        assert turn.second.publish().stored.task_id == FIRST
        assert turn.shown.state is State.RESERVED
        assert turn.first.begin().case == "begun"
        assert turn.second.publish().stored.state is State.STARTED, "its run is enough"
        turn.first.complete(turn.first.record().token)

        assert turn.second.publish().case == "reserved"

    def test_while_a_call_runs_lets_one_more_wait(self, collapsing: Turn) -> None:
        running = collapsing.first.started()

        assert collapsing.second.publish().case == "reserved"

        assert collapsing.third.publish().stored.task_id == SECOND
        assert collapsing.second.begin().case == "wait"
        assert collapsing.third.begin().case == "held"
        assert collapsing.shown.task_id == FIRST
        collapsing.first.complete(running.token)
        assert collapsing.shown.task_id == SECOND
        assert collapsing.second.begin().case == "begun"
        assert collapsing.third.publish().case == "reserved"

    def test_that_waits_renews_its_reservation(self, collapsing: Turn) -> None:
        collapsing.first.started()
        collapsing.second.publish(hold_ms=SHORT_MS * 10)

        collapsing.second.begin()

        name = collapsing.harness.store.config.slot_name(collapsing.harness.key)
        assert HOLD_MS - 5000 < collapsing.harness.client.pttl(name) <= HOLD_MS

    def test_is_given_back_by_its_message_alone(self, turn: Turn) -> None:
        turn.first.publish()
        assert turn.second.give_back(SECOND).case == "reserved"
        assert turn.second.publish().case == "held"

        assert turn.first.give_back(FIRST).case == "reserved"

        assert turn.second.publish().case == "reserved"

    def test_sees_a_message_that_has_begun_without_its_slot(self, collapsing: Turn) -> None:
        """A worker of another version, or with other options, does not know the slot."""
        collapsing.first.publish()
        command = commands.begin(
            collapsing.first.key.turn,
            execution_id=b"8 bytes.",
            task_id=FIRST,
            worker="w/1",
            lease_ms=LEASE_MS,
            retention_ms=RETENTION_MS,
        )._replace(key=collapsing.first.key)
        assert run_sync(collapsing.harness.store.execute(command)).case == "begun"

        assert collapsing.second.publish().case == "reserved"


class TestNewestArguments:
    """Scripts only: no option uses them yet."""

    def test_wait_in_the_record_of_the_message(self, collapsing: Turn) -> None:
        collapsing.first.publish()
        for arguments in (b"second", b"third"):
            reply = collapsing.second.publish(arguments=arguments, keep_ms=RETENTION_MS)
            assert reply.stored.task_id == FIRST

        collapsing.harness.forget()

        begun = collapsing.first.started()
        assert begun.body == b"third"
        collapsing.first.release(begun.token, HOLD_MS, generation=1)
        assert collapsing.first.started(generation=1).body == b"third", "also for its retry"
        collapsing.first.abandon()
        assert collapsing.first.started(generation=1).body == b"third", "and a takeover"

    def test_that_are_too_large_hand_the_place_over(self, collapsing: Turn) -> None:
        collapsing.first.publish()

        assert collapsing.second.publish(arguments=b"=", keep_ms=RETENTION_MS).case == "reserved"

        older = collapsing.first.begin()
        assert older.case == "finished"
        assert layout.read_task_id(older.stored.body) == SECOND
        assert collapsing.second.begin().case == "begun"

    def test_a_quiet_time_postpones_the_begin(self, collapsing: Turn) -> None:
        quiet = {"quiet_ms": 300, "max_wait_ms": LEASE_MS}
        collapsing.first.publish(**quiet)
        assert collapsing.first.begin().case == "wait"
        at_ms = collapsing.slot_at_ms()

        def is_postponed() -> bool:
            collapsing.second.publish(**quiet)
            return collapsing.slot_at_ms() > at_ms

        eventually(is_postponed)
        eventually(lambda: collapsing.first.begin().case == "begun")


def test_a_newer_call_replaces_the_running_one(turn: Turn) -> None:
    """Scripts only: no option uses it yet."""
    older = turn.first.started()

    newer = turn.second.begin(replaces=1)

    assert (newer.case, newer.token > older.token) == ("begun", True)
    assert turn.first.extend(older.token).case == turn.first.complete(older.token).case == "lost"
    assert turn.first.begin(generation=1).case == "finished", "neither its copies nor its retry run"
    assert turn.third.begin(replaces=2).case == "held"


class TestForget:
    def test_refuses_the_outcome_of_the_running_call(self, collapsing: Turn) -> None:
        running = collapsing.first.started()
        collapsing.second.publish()
        assert collapsing.harness.forget(running, force=False).case == "running"

        assert collapsing.harness.forget(running).case == "ok"

        assert collapsing.first.complete(running.token).case == "lost"
        assert collapsing.third.begin().case == "begun"

    def test_keeps_outcomes_for_copies(self, turn: Turn) -> None:
        shown = turn.first.completed(task_id=FIRST)

        assert turn.harness.forget(shown).case == "ok"

        assert turn.first.begin().case == "finished"
        assert turn.second.begin().case == "begun"


@pytest.mark.parametrize("end", ["running", "completed"])
def test_a_change_of_the_mode(harness: RecordHarness, end: str) -> None:
    turn = Turn(harness)
    getattr(harness, "started" if end == "running" else end)(task_id=SECOND)
    expected = "held" if end == "running" else "begun"
    assert turn.first.begin().case == expected, "it may run again now"
    harness.forget()
    turn.first.forget()

    begun = turn.first.started()
    if end == "completed":
        turn.first.complete(begun.token)

    assert harness.begin(task_id=SECOND).case == expected, "it does not any more"
