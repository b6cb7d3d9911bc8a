"""abandon: the parent process saw its child die, or is about to kill it."""

from __future__ import annotations

import pytest

from celery_idempotent.record.record import State
from tests.store.record_harness import FIRST, LEASE_MS, OTHER_WORKER, SECOND, WORKER, RecordHarness
from tests.waiting import eventually


def test_the_next_begin_takes_over_at_once(harness: RecordHarness) -> None:
    dead = harness.started()

    assert harness.abandon().case == "ok"

    heir = harness.begin(task_id=SECOND)
    assert (heir.case, heir.there.attempt) == ("begun", 2)
    assert heir.token > dead.token


def test_the_same_message_takes_over_as_well(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon()

    assert harness.begin().case == "begun"


def test_a_child_that_lives_a_moment_longer_can_do_nothing(harness: RecordHarness) -> None:
    token = harness.started().token

    harness.abandon(grace_ms=LEASE_MS)

    assert harness.extend(token).case == "lost"
    assert harness.save_step(token).case == "lost"
    assert harness.complete(token).case == "lost"
    assert harness.release(token).case == "lost"
    assert harness.record().state is State.STARTED


def test_a_child_about_to_be_killed_keeps_others_out_till_then(harness: RecordHarness) -> None:
    harness.started()

    answer = harness.abandon(grace_ms=100)

    assert harness.record().at_ms == answer.now_ms + 100
    assert harness.begin(task_id=SECOND).case == "held"
    eventually(lambda: harness.begin(task_id=SECOND).case == "begun")


def test_a_lease_gets_no_longer_by_it(harness: RecordHarness) -> None:
    running = harness.started(lease_ms=1000)

    harness.abandon(grace_ms=LEASE_MS)

    assert harness.record().at_ms == running.at_ms


def test_the_record_is_remembered_as_long_as_before(harness: RecordHarness) -> None:
    harness.started()
    before = harness.left_ms()

    harness.abandon()

    assert before - 5000 < harness.left_ms() <= before


def test_what_the_record_knows_stays(harness: RecordHarness) -> None:
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
def test_nobody_elses_lease_is_touched(harness: RecordHarness, task_id: str, worker: str) -> None:
    running = harness.started()

    answer = harness.abandon(task_id, worker)

    assert (answer.case, answer.record) == ("lost", running)
    assert harness.record() == running


def test_a_second_time_does_no_harm(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon()

    assert harness.abandon().case == "ok"
    assert harness.begin().there.attempt == 2


def test_a_second_time_after_a_takeover_is_too_late(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon()
    heir = harness.started(worker=OTHER_WORKER)

    assert harness.abandon().case == "lost"
    assert harness.record() == heir


def test_an_outcome_is_not_touched(harness: RecordHarness) -> None:
    done = harness.completed()

    assert harness.abandon()[:2] == ("lost", done)
    assert harness.record() == done


def test_a_reservation_is_not_touched(harness: RecordHarness) -> None:
    held = harness.held_for_retry()

    assert harness.abandon().case == "lost"
    assert harness.record() == held


def test_an_absent_key_stays_so(harness: RecordHarness) -> None:
    assert harness.abandon()[:2] == ("lost", None)
    assert harness.raw is None


def test_a_child_with_a_long_name_is_found(harness: RecordHarness) -> None:
    worker = "celery@" + "h" * 300 + "/4711"
    harness.started(worker=worker)

    assert harness.abandon(FIRST, worker).case == "ok"
