"""extend: the heartbeat renews a lease."""

from __future__ import annotations

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import Key
from celery_idempotent.store import commands
from celery_idempotent.store.commands import LeaseExtension
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from tests.store.record_harness import (
    LEASE_MS,
    RESULT,
    RETENTION_MS,
    SECOND,
    SHORT_MS,
    RecordHarness,
)

pytestmark = pytest.mark.core


def test_a_lease_is_extended_from_now(harness: RecordHarness) -> None:
    running = harness.started(lease_ms=1000)

    reply = harness.extend(running.token)

    assert reply.case == "ok"
    assert harness.record().at_ms == reply.now_ms + LEASE_MS


def test_nothing_but_the_deadline_changes(harness: RecordHarness) -> None:
    running = harness.started()
    harness.save_step(running.token)
    before = harness.raw
    assert before is not None

    harness.extend(running.token, lease_ms=2 * LEASE_MS)

    after = harness.raw
    assert after is not None
    assert after[:9] == before[:9]
    assert after[15:] == before[15:]


def test_a_lease_may_be_shortened(harness: RecordHarness) -> None:
    running = harness.started()

    reply = harness.extend(running.token, lease_ms=SHORT_MS)

    assert harness.record().at_ms == reply.now_ms + SHORT_MS


def test_the_expiry_of_the_record_is_extended(harness: RecordHarness) -> None:
    running = harness.started()
    harness.client.pexpire(harness.name, 60_000)

    harness.extend(running.token)

    assert LEASE_MS + RETENTION_MS - 5000 < harness.left_ms() <= LEASE_MS + RETENTION_MS


def test_an_expired_lease_can_be_extended(harness: RecordHarness) -> None:
    running = harness.expired()

    assert harness.extend(running.token).case == "ok"
    assert harness.begin(task_id=SECOND).case == "held"


def test_a_lease_that_was_taken_over_is_lost(harness: RecordHarness) -> None:
    stale = harness.expired()
    successor = harness.started(task_id=SECOND)

    reply = harness.extend(stale.token)

    assert reply.case == "lost"
    assert reply.record == successor == harness.record()


def test_a_finished_execution_has_no_lease(harness: RecordHarness) -> None:
    done = harness.completed()

    reply = harness.extend(done.token)

    assert (reply.case, reply.record) == ("lost", done)
    assert harness.record() == done


def test_the_lease_of_a_forgotten_key_is_lost(harness: RecordHarness) -> None:
    running = harness.started()
    harness.forget()

    assert harness.extend(running.token)[:2] == ("lost", None)
    assert harness.raw is None


def test_each_lease_gets_its_own_reply(harness: RecordHarness) -> None:
    keys = [Key("shop.charge", f"{number:022}") for number in range(4)]
    tokens = [harness.started(key=key).token for key in keys]
    run_sync(harness.store.execute(commands.complete(keys[1], tokens[1], RESULT, RETENTION_MS)))
    harness.client.delete(harness.store.name(keys[2]))
    harness.client.rpush(harness.store.name(keys[2]), "not a record")
    harness.client.expire(harness.store.name(keys[2]), 60)

    replies = run_sync(
        harness.store.extend(
            [
                LeaseExtension(key, token, LEASE_MS, RETENTION_MS)
                for key, token in zip(keys, tokens, strict=True)
            ]
        )
    )

    cases = [reply.case if isinstance(reply, Reply) else type(reply) for reply in replies]
    assert cases == ["ok", "lost", CorruptRecordError, "ok"]
    assert str(keys[2]) in str(replies[2])


def test_an_empty_batch_of_leases_is_allowed(harness: RecordHarness) -> None:
    assert run_sync(harness.store.extend([])) == []
