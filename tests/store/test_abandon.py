"""abandon: the parent process reports a child that died, or that it is about to kill."""

from __future__ import annotations

import pytest

from celery_idempotent.record import layout
from celery_idempotent.record.record import State
from tests.store.record_harness import FIRST, LEASE_MS, OTHER_WORKER, SECOND, WORKER, RecordHarness
from tests.waiting import eventually


def test_the_next_begin_takes_over_at_once(harness: RecordHarness) -> None:
    dead = harness.started()

    assert harness.abandon().case == "ok"

    successor = harness.begin(task_id=SECOND)
    assert (successor.case, successor.stored.attempt) == ("begun", 2)
    assert successor.token > dead.token


def test_the_record_has_the_reason_until_the_next_begin(harness: RecordHarness) -> None:
    harness.started()
    assert harness.record().ended_by is None

    harness.abandon(reason="hard_time_limit")

    assert harness.record().ended_by == "hard_time_limit"
    assert harness.begin(task_id=SECOND).stored.ended_by is None


def test_the_execution_can_tell_that_no_other_has_begun(harness: RecordHarness) -> None:
    token = harness.started().token
    assert not layout.is_abandoned(harness.client.get(harness.name), token, WORKER)

    harness.abandon(reason="hard_time_limit")

    assert layout.is_abandoned(harness.client.get(harness.name), token, WORKER)
    assert not layout.is_abandoned(harness.client.get(harness.name), token, OTHER_WORKER)
    assert not layout.is_abandoned(b"S", token, WORKER)
    harness.begin(task_id=SECOND)
    assert not layout.is_abandoned(harness.client.get(harness.name), token, WORKER)


def test_the_same_message_takes_over_as_well(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon()

    assert harness.begin().case == "begun"


def test_the_outcome_of_an_abandoned_execution_is_refused(harness: RecordHarness) -> None:
    token = harness.started().token

    harness.abandon(grace_ms=LEASE_MS)

    assert harness.extend(token).case == "lost"
    assert harness.save_step(token).case == "lost"
    assert harness.complete(token).case == "lost"
    assert harness.release(token).case == "lost"
    assert harness.record().state is State.STARTED


def test_during_the_grace_period_the_key_is_held(harness: RecordHarness) -> None:
    harness.started()

    reply = harness.abandon(grace_ms=100)

    assert harness.record().at_ms == reply.now_ms + 100
    assert harness.begin(task_id=SECOND).case == "held"
    eventually(lambda: harness.begin(task_id=SECOND).case == "begun")


def test_the_grace_period_does_not_extend_the_lease(harness: RecordHarness) -> None:
    running = harness.started(lease_ms=1000)

    harness.abandon(grace_ms=LEASE_MS)

    assert harness.record().at_ms == running.at_ms


def test_the_expiry_of_the_record_stays(harness: RecordHarness) -> None:
    harness.started()
    before = harness.left_ms()

    harness.abandon()

    assert before - 5000 < harness.left_ms() <= before


def test_the_other_fields_stay(harness: RecordHarness) -> None:
    running = harness.started()
    harness.save_step(running.token)

    harness.abandon()

    record = harness.record()
    assert (record.attempt, record.task_id, record.worker) == (1, FIRST, WORKER)
    assert record.fingerprint == running.fingerprint
    assert "reserve" in harness.steps


@pytest.mark.parametrize(
    ("task_id", "worker"),
    [(SECOND, WORKER), (FIRST, OTHER_WORKER), (SECOND, OTHER_WORKER)],
    ids=["other-task", "other-child", "both"],
)
def test_the_lease_of_another_execution_stays(
    harness: RecordHarness, task_id: str, worker: str
) -> None:
    running = harness.started()

    reply = harness.abandon(task_id, worker)

    assert (reply.case, reply.record) == ("lost", running)
    assert harness.record() == running


def test_a_second_abandon_changes_nothing(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon()

    assert harness.abandon().case == "ok"
    assert harness.begin().stored.attempt == 2


def test_a_second_abandon_after_a_takeover_is_lost(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon()
    successor = harness.started(worker=OTHER_WORKER)

    assert harness.abandon().case == "lost"
    assert harness.record() == successor


def test_an_outcome_stays(harness: RecordHarness) -> None:
    done = harness.completed()

    assert harness.abandon()[:2] == ("lost", done)
    assert harness.record() == done


def test_a_reservation_stays(harness: RecordHarness) -> None:
    held = harness.held_for_retry()

    assert harness.abandon().case == "lost"
    assert harness.record() == held


def test_an_absent_key_stays_absent(harness: RecordHarness) -> None:
    assert harness.abandon()[:2] == ("lost", None)
    assert harness.raw is None


def test_a_worker_with_a_long_name_is_recognised(harness: RecordHarness) -> None:
    worker = "celery@" + "h" * 300 + "/4711"
    harness.started(worker=worker)

    assert harness.abandon(FIRST, worker).case == "ok"
