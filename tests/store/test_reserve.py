"""reserve: the key is reserved for a task that is about to be published."""

from __future__ import annotations

from celery_idempotent.record.record import State
from tests.store.record_harness import (
    FIRST,
    HOLD_MS,
    NO_ARGUMENTS,
    OTHER_ARGUMENTS,
    RETENTION_MS,
    SECOND,
    RecordHarness,
)


def test_an_absent_key_is_reserved(harness: RecordHarness) -> None:
    reply = harness.reserve()

    record = harness.record()
    assert (reply.case, reply.record) == ("reserved", record)
    assert record.state is State.RESERVED
    assert (record.task_id, record.worker, record.attempt) == (FIRST, "", 0)
    assert record.at_ms == reply.now_ms + HOLD_MS
    assert record.fingerprint == harness.key.fingerprint
    assert HOLD_MS - 5000 < harness.left_ms() <= HOLD_MS


def test_a_key_that_is_reserved_is_held_for_the_first(harness: RecordHarness) -> None:
    first = harness.reserved()

    reply = harness.reserve(SECOND)

    assert (reply.case, reply.record) == ("held", first)
    assert harness.record() == first


def test_the_same_task_id_may_reserve_again(harness: RecordHarness) -> None:
    first = harness.reserved()

    again = harness.reserve()

    assert again.case == "reserved"
    assert again.token > first.token


def test_a_key_that_runs_is_held(harness: RecordHarness) -> None:
    running = harness.started()

    for task_id in (FIRST, SECOND):
        reply = harness.reserve(task_id)
        assert (reply.case, reply.record) == ("held", running)
    assert harness.record() == running


def test_an_expired_lease_is_left_for_a_takeover(harness: RecordHarness) -> None:
    dead = harness.expired()

    reply = harness.reserve(SECOND)

    assert (reply.case, reply.record) == ("expired", dead)
    assert harness.begin(task_id=SECOND).stored.attempt == 2


def test_a_finished_key_replies_with_its_outcome(harness: RecordHarness) -> None:
    for given in (harness.completed, harness.failed, harness.poisoned):
        harness.client.delete(harness.name)
        done = given()

        reply = harness.reserve(SECOND)

        assert (reply.case, reply.record) == ("finished", done)
        assert harness.record() == done


def test_a_key_with_other_arguments_is_reused(harness: RecordHarness) -> None:
    for given in (
        harness.started,
        harness.expired,
        harness.reserved,
        harness.held_for_retry,
        harness.completed,
        harness.failed,
    ):
        harness.client.delete(harness.name)
        given()
        before = harness.raw

        assert harness.reserve(key=OTHER_ARGUMENTS).case == "reused", given.__name__
        assert harness.raw == before


def test_one_side_without_a_fingerprint_is_not_a_reuse(harness: RecordHarness) -> None:
    harness.reserved()

    assert harness.reserve(key=NO_ARGUMENTS).case == "reserved"
    assert harness.record().fingerprint == harness.key.fingerprint


def test_finished_steps_stay_for_the_retry(harness: RecordHarness) -> None:
    running = harness.started()
    harness.save_step(running.token)
    harness.release(running.token, HOLD_MS)

    assert harness.reserve().case == "reserved"
    assert "reserve" in harness.steps
    assert harness.left_ms() > RETENTION_MS - 5000, "and longer than the reservation"
