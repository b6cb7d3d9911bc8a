"""The transitions of a key on every kind of deployment, and what only Python reads and writes.

`labs/verification` compares each script with the model on each kind of record: its reply, the
bytes, the expiry and what it publishes. Here are the promises in examples.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import partial
from threading import Barrier
from typing import Any

import pytest

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Payload, State, Tail, layout
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.commands import UNREADABLE
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import CorruptRecordError
from tests.store.deployments import Site
from tests.store.record_harness import (
    FIRST,
    HOLD_MS,
    LEASE_MS,
    OTHER_WORKER,
    RESULT,
    RETENTION_MS,
    SECOND,
    WORKER,
    Harness,
    RecordReply,
    Turn,
    begin,
    keys,
    store_at,
)

pytestmark = pytest.mark.core


CONTENDERS = 32
MOMENT = timedelta(seconds=2)
OTHER = Key("shop.refund", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")


class TestBegin:
    def test_grants_a_lease_by_the_servers_clock(self, harness: Harness) -> None:
        before = harness.now_ms()
        reply = harness.begin()

        record = harness.record()
        assert (reply.case, reply.record) == ("begun", record)
        assert (record.state, record.attempt) == (State.STARTED, 1)
        assert (record.task_id, record.worker) == (FIRST, WORKER)
        assert record.fingerprint == harness.key.fingerprint
        assert before <= reply.now_ms <= harness.now_ms()
        assert record.at_ms == reply.now_ms + LEASE_MS

    def test_marks_an_expired_lease_before_it_takes_over(self, harness: Harness) -> None:
        dead = harness.silent()

        reply = harness.begin(task_id=SECOND, worker=OTHER_WORKER)

        assert reply.case == "begun"
        assert reply.token > dead.token
        assert (reply.stored.attempt, reply.stored.task_id) == (2, SECOND)
        assert reply.stored.worker == OTHER_WORKER
        assert layout.begun(harness.raw or b"").orphaned_seconds is not None
        assert harness.complete(dead.token).case == "lost"

    @pytest.mark.parametrize("given", [Harness.forget, Harness.dead])
    def test_of_many_at_once_grants_one(self, harness: Harness, given: Any) -> None:
        given(harness)
        gun = Barrier(CONTENDERS)

        def begin(number: int) -> RecordReply:
            gun.wait()
            return harness.begin(task_id=f"task-{number}")

        with ThreadPoolExecutor(CONTENDERS) as pool:
            replies = list(pool.map(begin, range(CONTENDERS)))

        assert sorted(reply.case for reply in replies) == ["begun", *["held"] * (CONTENDERS - 1)]
        assert {reply.record for reply in replies} == {harness.record()}


def test_commands_do_nothing_after_their_deadline(harness: Harness) -> None:
    """As copies that were sent before, and are executed after the call has ended."""
    harness.completed()
    before = harness.raw
    late = [begin(OTHER), commands.reserve(OTHER, FIRST, HOLD_MS), commands.forget(harness.key)]
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
    assert run_sync(harness.store.get(OTHER)) is None


def test_an_extension_of_many_leases_has_a_reply_for_each(harness: Harness) -> None:
    leases = [harness.lease_of(key) for key in keys(4)]
    second, third = leases[1:3]
    settle = commands.complete(second.key, second.token, RESULT, RETENTION_MS)
    run_sync(harness.store.execute(settle))
    name = harness.store.name(third.key)
    harness.client.delete(name)
    harness.client.rpush(name, "not a record")
    harness.client.expire(name, 60)

    replies = run_sync(harness.store.extend(leases))

    cases = [reply.case if isinstance(reply, Reply) else type(reply) for reply in replies]
    assert cases == ["ok", "lost", CorruptRecordError, "ok"]
    assert str(third.key) in str(replies[2])
    assert run_sync(harness.store.extend([])) == []


class TestOutcome:
    def test_of_a_stale_one_is_refused_with_what_is_stored(self, harness: Harness) -> None:
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

    def test_has_any_bytes(self, harness: Harness) -> None:
        payload = Payload("json+gzip", bytes(range(256)) * 4096)

        harness.complete(harness.started().token, payload)

        assert (harness.record().format, harness.record().body) == payload


class TestAbandon:
    def test_ends_the_lease_at_once_with_a_reason(self, harness: Harness) -> None:
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

    def test_recognises_a_worker_with_a_long_name(self, harness: Harness) -> None:
        worker = "celery@" + "é" * 200 + "/4711"
        stored = harness.started(worker=worker).worker

        assert worker.endswith(stored)
        assert len(stored.encode()) >= 250
        assert harness.abandon(FIRST, OTHER_WORKER).case == "lost"
        assert harness.abandon(FIRST, worker).case == "ok"


class TestGet:
    def test_reads_a_running_execution_with_its_times(self, harness: Harness) -> None:
        begun = harness.started()

        record = run_sync(harness.store.get(harness.key))

        assert (record.state, record.task) == (State.STARTED, "shop.charge")
        assert (record.key, record.task_id, record.worker) == (str(harness.key), FIRST, WORKER)
        assert (record.token, record.attempt) == (begun.token, 1)
        now = datetime.fromtimestamp(harness.now_ms() / 1000, tz=timezone.utc)
        for time, after_ms in (
            (record.started_at, 0),
            (record.deadline, LEASE_MS),
            (record.expires_at, LEASE_MS + RETENTION_MS),
        ):
            assert abs(time - now - timedelta(milliseconds=after_ms)) < MOMENT
        assert record.result is None

    def test_reads_a_record_without_an_expiry(self, harness: Harness) -> None:
        harness.completed()
        harness.client.persist(harness.name)

        assert run_sync(harness.store.get(harness.key)).expires_at is None
        harness.forget()

    def test_reads_no_record_of_another_prefix(self, harness: Harness, site: Site) -> None:
        other = Harness(store_at(**site.how, prefix="other"), harness.client)
        harness.completed()

        assert run_sync(other.store.get(harness.key)) is None
        assert other.begin().case == "begun"


def test_a_value_of_another_type_is_a_corrupt_record(harness: Harness) -> None:
    shown = harness.completed()
    harness.client.delete(harness.name)
    harness.client.hset(harness.name, "field", "value")
    harness.client.expire(harness.name, 60)
    given = (harness.complete, harness.fail, harness.release, harness.save_step, harness.mark_sent)
    calls: list[Callable[[], object]] = [partial(call, 17) for call in given]
    calls += [harness.begin, harness.reserve, harness.abandon]
    calls.append(lambda: run_sync(harness.store.get(harness.key)))

    for call in calls:
        with pytest.raises(CorruptRecordError, match=str(harness.key)):
            call()
    assert harness.forget(shown).case == "changed"
    assert harness.client.hgetall(harness.name) == {b"field": b"value"}
    assert harness.forget(UNREADABLE).case == "ok"
    assert not harness.client.exists(harness.name)


def test_tokens_are_the_servers_time_in_microseconds(harness: Harness) -> None:
    replies = []
    for _ in range(20):
        replies.append(harness.begin())
        harness.release(replies[-1].token)

    assert all(reply.token // 1000 == reply.now_ms for reply in replies)
    # A token that was rounded to fourteen digits would end in two zeros.
    assert any(reply.token % 100 for reply in replies)


class TestLabel:
    def test_stays_in_the_record_and_costs_its_bytes(self, harness: Harness) -> None:
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

    def test_that_another_program_wrote_is_escaped(self, harness: Harness) -> None:
        harness.complete(harness.started().token, tail=Tail(label="order 42 · Straße"))
        raw = harness.raw or b""
        harness.put(raw.replace("Straße".encode(), b"\x1b[2J\xff\n\n"))

        assert harness.record().label == "order 42 · \\x1b[2J\ufffd"


def test_the_next_message_runs_after_the_end_and_copies_replay(harness: Harness) -> None:
    turn, tokens = Turn(harness), []
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


class TestPublish:
    def test_while_a_call_runs_lets_one_more_wait(self, harness: Harness) -> None:
        collapsing = Turn(harness, waits=True)
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

    def test_sees_a_message_that_has_begun_without_its_slot(self, harness: Harness) -> None:
        """A worker of another version, or with other options, does not know the slot."""
        collapsing = Turn(harness, waits=True)
        collapsing.first.publish()
        command = begin(collapsing.first.key.turn)._replace(key=collapsing.first.key)
        assert run_sync(collapsing.harness.store.execute(command)).case == "begun"

        assert collapsing.second.publish().case == "reserved"
