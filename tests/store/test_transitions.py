"""The transitions of a key, one after another, on every kind of deployment.

`test_table` compares each script with the model on each kind of record: its reply, the bytes and
the expiry. Here are the promises in examples, and what only Python reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import MAX_BYTES
from celery_idempotent.core.record import Payload, Record, State, Tail, layout
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.commands import NO_RECORD, UNREADABLE, LeaseExtension
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import CorruptRecordError
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    HOLD_MS,
    LEASE_MS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    OWNER,
    RESULT,
    RETENTION_MS,
    SECOND,
    SHORT_MS,
    THIRD,
    WORKER,
    RecordHarness,
    raw_record,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core

#: Another execution id.
THIS = b"another!"

OTHER_KEY = Key("shop.refund", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")

GIVEN: tuple[Callable[[RecordHarness], Record], ...] = (
    RecordHarness.started,
    RecordHarness.dead,
    RecordHarness.held_for_retry,
    RecordHarness.completed,
    RecordHarness.failed,
    RecordHarness.poisoned,
)
given_any = pytest.mark.parametrize("given", GIVEN, ids=lambda given: given.__name__)


class TestBegin:
    def test_of_an_absent_key_grants_a_lease_by_the_servers_clock(
        self, harness: RecordHarness
    ) -> None:
        before = harness.now_ms()
        reply = harness.begin()

        record = harness.record()
        assert (reply.case, reply.record) == ("begun", record)
        assert (record.state, record.attempt) == (State.STARTED, 1)
        assert (record.task_id, record.worker) == (FIRST, WORKER)
        assert record.fingerprint == harness.key.fingerprint
        assert before <= reply.now_ms <= harness.now_ms()
        assert record.at_ms == reply.now_ms + LEASE_MS

    def test_marks_an_expired_lease_before_it_takes_over(self, harness: RecordHarness) -> None:
        dead = harness.silent()

        reply = harness.begin(task_id=SECOND, worker=OTHER_WORKER)

        assert reply.case == "begun"
        assert reply.token > dead.token
        assert (reply.stored.attempt, reply.stored.task_id) == (2, SECOND)
        assert reply.stored.worker == OTHER_WORKER
        assert layout.begun(harness.raw or b"").orphaned_seconds is not None
        assert harness.complete(dead.token).case == "lost"

    def test_an_extension_after_the_mark_keeps_the_lease(self, harness: RecordHarness) -> None:
        alive = harness.silent()

        assert harness.extend(alive.token).case == "ok"

        assert harness.begin(task_id=SECOND).case == "held"
        assert harness.complete(alive.token).case == "ok"

    def test_that_was_granted_to_nobody_is_not_a_death(self, harness: RecordHarness) -> None:
        harness.silent(confirmed=False)

        reply = harness.begin(task_id=SECOND)

        assert (reply.case, reply.stored.attempt) == ("begun", 1)

    def test_sent_again_gets_the_same_grant_and_renews_it(self, harness: RecordHarness) -> None:
        first = harness.begin(execution_id=OWNER)

        again = harness.begin(execution_id=OWNER, lease_ms=2 * LEASE_MS)

        assert (again.case, again.token) == ("begun", first.token)
        assert again.stored.at_ms == again.now_ms + 2 * LEASE_MS
        assert harness.begin(execution_id=THIS).case == "held"

    def test_counts_up_to_255_deaths(self, harness: RecordHarness) -> None:
        for _ in range(256):
            harness.dead()

        assert harness.record().attempt == 255

    def test_after_a_reservation_is_for_any_message(self, harness: RecordHarness) -> None:
        """The slot only keeps publishers back, and ends when its message begins."""
        harness.reserved()
        assert harness.reserve(SECOND).stored.task_id == FIRST

        assert harness.begin(hold_ms=HOLD_MS).case == "begun"

        assert run_sync(harness.store.slot(harness.key)) is None

    @given_any
    def test_with_other_arguments_is_a_reuse(
        self, harness: RecordHarness, given: Callable[[RecordHarness], Record]
    ) -> None:
        has_arguments = given(harness).fingerprint != b""
        before = harness.raw

        reply = harness.begin(key=OTHER_ARGUMENTS, task_id=THIRD)

        assert reply.case == ("reused" if has_arguments else "held")
        assert harness.raw == before


class TestLate:
    def test_commands_do_nothing_after_their_deadline(self, harness: RecordHarness) -> None:
        """As copies that were sent before, and are executed after the call has ended."""
        harness.completed()
        before = harness.raw
        late = [
            commands.begin(
                OTHER_KEY,
                execution_id=OWNER,
                task_id=FIRST,
                worker=WORKER,
                lease_ms=LEASE_MS,
                retention_ms=RETENTION_MS,
            ),
            commands.reserve(OTHER_KEY, FIRST, HOLD_MS),
            commands.forget(harness.key),
        ]
        past = harness.now_ms() - 1
        for command in late:
            arguments = [past if each is commands.DEADLINE else each for each in command.arguments]
            config, key = harness.store.config, command.key
            names = {commands.RECORD: config.name(key), commands.SLOT: config.slot_name(key)}
            keys = [names[kind] for kind in command.keys]

            raw = harness.client.eval(command.script.source, len(keys), *keys, *arguments)

            reply = command.script.reply(raw)
            assert reply.case == "late"
            assert abs(reply.now_ms - harness.now_ms()) < 1000
        assert harness.raw == before
        assert run_sync(harness.store.get(OTHER_KEY)) is None


class TestExtend:
    def test_of_many_leases_has_a_reply_for_each(self, harness: RecordHarness) -> None:
        keys = [Key("shop.charge", f"{number:022}") for number in range(4)]
        tokens = [harness.started(key=key).token for key in keys]
        run_sync(harness.store.execute(commands.complete(keys[1], tokens[1], RESULT, RETENTION_MS)))
        name = harness.store.name(keys[2])
        harness.client.delete(name)
        harness.client.rpush(name, "not a record")
        harness.client.expire(name, 60)
        pairs = zip(keys, tokens, strict=True)
        leases = [LeaseExtension(key, token, LEASE_MS, RETENTION_MS) for key, token in pairs]

        replies = run_sync(harness.store.extend(leases))

        cases = [reply.case if isinstance(reply, Reply) else type(reply) for reply in replies]
        assert cases == ["ok", "lost", CorruptRecordError, "ok"]
        assert str(keys[2]) in str(replies[2])
        assert run_sync(harness.store.extend([])) == []


class TestOutcome:
    @pytest.mark.parametrize(
        ("settle", "state", "outcome", "kept_ms"),
        [
            (RecordHarness.complete, State.COMPLETED, RESULT, RETENTION_MS),
            (RecordHarness.fail, State.FAILED, ERROR, ERROR_MS),
        ],
        ids=["complete", "fail"],
    )
    def test_is_stored_for_its_retention_and_ends_the_steps(
        self, harness: RecordHarness, settle: Any, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.started()
        harness.save_step(running.token)

        reply = settle(harness, running.token)

        record = harness.record()
        assert reply.case == "ok"
        assert (record.state, (record.format, record.body)) == (state, outcome)
        assert (record.token, record.attempt) == (running.token, 1)
        assert (record.task_id, record.worker) == (FIRST, WORKER)
        assert record.at_ms == reply.now_ms
        assert kept_ms - 5000 < harness.left_ms() <= kept_ms
        before = harness.raw
        assert settle(harness, running.token).case == "ok", "sent again"
        assert harness.raw == before
        duplicate = harness.begin(task_id=SECOND)
        assert (duplicate.case, duplicate.record) == ("finished", record)
        assert harness.reserve(SECOND).case == "finished"

    def test_of_a_stale_execution_is_refused_with_what_is_stored(
        self, harness: RecordHarness
    ) -> None:
        stale = harness.silent()
        successor = harness.started(task_id=SECOND)
        for refused in (harness.complete, harness.fail, harness.extend, harness.save_step):
            reply = refused(stale.token)
            assert (reply.case, reply.record) == ("lost", successor)
        harness.complete(successor.token, Payload("json", b"the successor's"))

        for settle in (harness.complete, harness.fail):
            reply = settle(stale.token)
            assert (reply.case, reply.stored.body) == ("lost", b"the successor's")
        assert harness.fail(successor.token).case == "ok", "the first outcome stays"
        assert harness.state is State.COMPLETED
        harness.forget()
        assert harness.complete(stale.token)[:2] == ("lost", None)

    def test_is_accepted_after_the_lease_without_a_takeover(self, harness: RecordHarness) -> None:
        running = harness.silent()

        assert harness.complete(running.token).case == "ok"

    def test_has_any_bytes(self, harness: RecordHarness) -> None:
        payload = Payload("json+gzip", bytes(range(256)) * 4096)

        harness.complete(harness.started().token, payload)

        assert (harness.record().format, harness.record().body) == payload


class TestRelease:
    def test_frees_the_key_and_attempts_start_again(self, harness: RecordHarness) -> None:
        harness.dead()
        running = harness.started()

        for _ in range(2):
            assert harness.release(running.token).case == "ok"
            assert harness.raw is None

        assert harness.begin().stored.attempt == 1

    def test_reserves_the_key_for_a_retry(self, harness: RecordHarness) -> None:
        harness.dead()
        running = harness.started()

        reply = harness.release(running.token, HOLD_MS, generation=1)

        record = harness.record()
        assert reply.case == harness.release(running.token, HOLD_MS).case == "ok"
        assert (record.state, record.task_id, record.attempt) == (State.RESERVED, FIRST, 0)
        assert (record.at_ms, record.awaited) == (reply.now_ms + HOLD_MS, 1)
        assert HOLD_MS - 5000 < harness.left_ms() <= HOLD_MS
        assert harness.complete(running.token).case == "ok", "it has ended"
        assert harness.begin(task_id=SECOND, generation=1).case == "held"
        assert harness.begin(generation=0).case == "held", "a copy of the message before the retry"
        assert harness.begin(generation=1).stored.attempt == 1
        assert layout.begun(harness.raw or b"").orphaned_seconds is None

    def test_keeps_steps_for_the_next_execution(self, harness: RecordHarness) -> None:
        token = harness.started().token
        harness.save_step(token)

        assert harness.release(token).case == "ok"

        assert harness.record().fingerprint == harness.key.fingerprint
        assert "reserve" in harness.steps
        harness.started(task_id=SECOND)
        assert "reserve" in harness.steps

    def test_of_a_replacement_that_failed_frees_the_key(self, harness: RecordHarness) -> None:
        token = harness.started().token
        harness.delegate(token, 5)
        assert harness.complete(token).case == "ok", "settled already"
        assert harness.begin(generation=4).case == "finished"
        assert harness.begin(task_id=SECOND, generation=5).case == "finished"

        assert harness.release(token).case == "ok"

        assert harness.raw is None

    def test_of_a_replacement_lets_it_continue(self, harness: RecordHarness) -> None:
        token = harness.started().token
        harness.delegate(token, 5)

        assert harness.begin(generation=5).token > token


class TestAbandon:
    def test_ends_the_lease_at_once_with_a_reason(self, harness: RecordHarness) -> None:
        dead = harness.started()
        harness.save_step(dead.token)
        assert not layout.is_abandoned(harness.client.get(harness.name), dead.token, WORKER)

        assert harness.abandon(reason="hard_time_limit").case == "ok"

        assert harness.record().ended_by == "hard_time_limit"
        raw = harness.client.get(harness.name)
        assert layout.is_abandoned(raw, dead.token, WORKER)
        assert not layout.is_abandoned(raw, dead.token, OTHER_WORKER)
        assert not layout.is_abandoned(b"a", dead.token, WORKER)
        for refused in (harness.complete, harness.extend, harness.save_step, harness.release):
            assert refused(dead.token).case == "lost"
        successor = harness.begin(task_id=SECOND, worker=OTHER_WORKER)
        assert (successor.case, successor.stored.attempt) == ("begun", 2)
        assert successor.token > dead.token
        assert successor.stored.ended_by is None
        assert "reserve" in harness.steps
        assert harness.abandon().case == "lost"

    def test_holds_the_key_during_the_grace_period(self, harness: RecordHarness) -> None:
        harness.started(execution_id=OWNER)

        reply = harness.abandon(grace_ms=LEASE_MS // 2)

        assert harness.record().at_ms == reply.now_ms + LEASE_MS // 2
        assert harness.begin(execution_id=OWNER).case == "held"
        harness.forget()
        harness.started()
        harness.abandon(grace_ms=SHORT_MS)
        eventually(lambda: harness.begin(task_id=SECOND).case == "begun")

    def test_recognises_a_worker_with_a_long_name(self, harness: RecordHarness) -> None:
        worker = "celery@" + "é" * 200 + "/4711"
        stored = harness.started(worker=worker).worker

        assert worker.endswith(stored)
        assert len(stored.encode()) >= 250
        assert harness.abandon(FIRST, OTHER_WORKER).case == "lost"
        assert harness.abandon(FIRST, worker).case == "ok"


class TestContinuation:
    def test_is_sent_by_one_delivery_at_a_time(self, harness: RecordHarness) -> None:
        done = harness.sending()
        assert done.sending
        assert done.finished_at is None
        assert harness.begin().case == "held"
        assert harness.begin(task_id=SECOND).case == "finished", "it has one of its own"

        for _ in range(2):
            assert harness.mark_sent(done.token).case == "ok"

        noted = harness.record()
        assert not noted.sending
        assert noted.at_ms <= harness.now_ms()
        assert (noted.state, noted.body, noted.token) == (done.state, done.body, done.token)
        assert harness.begin().case == "finished"

    def test_of_a_dead_process_is_sent_by_the_next_delivery(self, harness: RecordHarness) -> None:
        done = harness.sending()
        assert harness.abandon().case == "sending"

        claimed = harness.begin(worker=OTHER_WORKER)

        assert (claimed.case, claimed.token) == ("send", done.token)
        assert harness.abandon().case == "lost", "the first sender's parent, late"
        assert harness.begin().case == "held"
        assert harness.mark_sent(done.token).case == "ok"
        assert harness.begin().case == "finished"


class TestForget:
    @given_any
    def test_deletes_any_record(
        self, harness: RecordHarness, given: Callable[[RecordHarness], Record]
    ) -> None:
        record = given(harness)
        for other in (record.token - 1, record.token + 1, 0):
            reply = harness.forget(replace(record, token=other))
            assert (reply.case, reply.record) == ("changed", record)
        for shown in (UNREADABLE, NO_RECORD):
            assert harness.forget(shown).case == "changed"
        assert harness.record() == record

        assert harness.forget(record).case == "ok"

        assert harness.raw is None
        for shown in (record, UNREADABLE, NO_RECORD, None):
            assert harness.forget(shown).case == "absent"
        given(harness)
        assert harness.forget().case == "ok"
        assert harness.begin(task_id=SECOND).stored.attempt == 1

    def test_of_a_running_call_takes_force(self, harness: RecordHarness) -> None:
        running = harness.started()
        reply = harness.forget(running, force=False)
        assert (reply.case, reply.record) == ("running", running)

        assert harness.forget(running).case == "ok"

        assert harness.extend(running.token).case == "lost"
        assert harness.dead().state is State.STARTED
        assert harness.forget(force=False).case == "ok"

    def test_frees_a_key_that_is_reserved(self, harness: RecordHarness) -> None:
        shown = harness.reserved()

        assert harness.forget(replace(shown, token=1)).case == "changed"
        assert harness.forget(shown).case == "ok"

        assert harness.reserve(SECOND).case == "reserved"

    @pytest.mark.parametrize("raw", [b"", b"S", b"Znewer", b"{}"])
    @pytest.mark.parametrize("shown", [None, UNREADABLE])
    def test_deletes_an_unreadable_record(
        self, harness: RecordHarness, raw: bytes, shown: str | None
    ) -> None:
        record = harness.completed()
        harness.put(raw)
        command = commands.forget(harness.key, record)
        assert run_sync(harness.store.execute(command)).case == "changed"

        assert harness.forget(shown).case == "ok"
        assert harness.raw is None


def test_a_value_of_another_type_is_a_corrupt_record(harness: RecordHarness) -> None:
    shown = harness.completed()
    harness.client.delete(harness.name)
    harness.client.hset(harness.name, "field", "value")
    harness.client.expire(harness.name, 60)
    calls: list[Callable[[], object]] = [
        harness.begin,
        harness.reserve,
        lambda: harness.complete(17),
        lambda: harness.fail(17),
        lambda: harness.release(17),
        lambda: harness.save_step(17),
        harness.abandon,
        lambda: harness.mark_sent(17),
        lambda: run_sync(harness.store.get(harness.key)),
    ]

    for call in calls:
        with pytest.raises(CorruptRecordError, match=str(harness.key)):
            call()
    assert harness.forget(shown).case == "changed"
    assert harness.client.hgetall(harness.name) == {b"field": b"value"}
    assert harness.forget(UNREADABLE).case == "ok"
    assert not harness.client.exists(harness.name)


class TestTokens:
    def test_grow_across_takeovers_releases_and_forgetting(self, harness: RecordHarness) -> None:
        ends: list[Callable[[int], object]] = [
            lambda token: harness.abandon(),
            harness.release,
            lambda token: harness.release(token, HOLD_MS),
            lambda token: (harness.complete(token), harness.forget()),
            lambda token: (harness.fail(token), harness.client.delete(harness.name)),
            lambda token: harness.forget(),
        ]

        tokens = []
        for end in ends * 3:
            tokens.append(harness.started().token)
            end(tokens[-1])

        assert tokens == sorted(set(tokens))

    def test_are_the_servers_time_in_microseconds(self, harness: RecordHarness) -> None:
        replies = []
        for _ in range(20):
            replies.append(harness.begin())
            harness.release(replies[-1].token)

        assert all(reply.token // 1000 == reply.now_ms for reply in replies)
        # A token that was rounded to fourteen digits would end in two zeros.
        assert any(reply.token % 100 for reply in replies)

    @pytest.mark.parametrize("last", [2**53 - 3, 9_007_199_254_740_001, 7_777_777_777_777_777])
    def test_grow_by_one_past_the_clock_to_the_last_digit(
        self, harness: RecordHarness, last: int
    ) -> None:
        # As after the server's clock was set back.
        fingerprint = harness.key.fingerprint
        harness.put(raw_record(b"a", token=last, at_ms=1, fingerprint=fingerprint))

        assert harness.started().token == last + 1
        assert harness.extend(last).case == harness.complete(last).case == "lost"
        assert harness.complete(last + 1).case == "ok"


class TestLabel:
    def test_stays_in_the_record_and_costs_its_bytes(self, harness: RecordHarness) -> None:
        label = "order 42 · Straße"
        tail = Tail(label=label)
        harness.completed()
        without = len(harness.raw or b"")
        harness.forget()
        assert harness.reserve(tail=tail).case == "reserved"
        assert harness.slot().label == label
        harness.release(harness.started(tail=tail).token, HOLD_MS)
        assert harness.record().label == label
        token = harness.started(tail=tail).token
        harness.save_step(token)
        harness.abandon()
        assert harness.record().label == label

        harness.complete(harness.started(tail=tail).token, tail=tail)

        assert harness.record().label == label
        assert len(harness.raw or b"") - without == len(label.encode()) + 2
        assert harness.record().fingerprint == harness.key.fingerprint

    def test_of_the_longest_size_fits(self, harness: RecordHarness) -> None:
        longest = "x" * MAX_BYTES
        harness.complete(harness.started().token, tail=Tail(label=longest))

        assert harness.record().label == longest

    def test_that_another_program_wrote_is_escaped(self, harness: RecordHarness) -> None:
        harness.complete(harness.started().token, tail=Tail(label="order 42 · Straße"))
        raw = harness.raw or b""
        harness.put(raw.replace("Straße".encode(), b"\x1b[2J\xff\n\n"))

        assert harness.record().label == "order 42 · \\x1b[2J\ufffd"
