"""abandon: the parent process saw its child die, or is about to kill it."""

from __future__ import annotations

import pytest

from celery_idempotent.record.record import State
from tests.store.record_harness import FIRST, LEASE_MS, OTHER_WORKER, SECOND, WORKER, Scene
from tests.waiting import eventually


def test_the_next_begin_takes_over_at_once(scene: Scene) -> None:
    dead = scene.started()

    assert scene.abandon().case == "ok"

    heir = scene.begin(task_id=SECOND)
    assert (heir.case, heir.there.attempt) == ("begun", 2)
    assert heir.token > dead.token


def test_the_same_message_takes_over_as_well(scene: Scene) -> None:
    scene.started()
    scene.abandon()

    assert scene.begin().case == "begun"


def test_a_child_that_lives_a_moment_longer_can_do_nothing(scene: Scene) -> None:
    token = scene.started().token

    scene.abandon(grace_ms=LEASE_MS)

    assert scene.extend(token).case == "lost"
    assert scene.step(token).case == "lost"
    assert scene.complete(token).case == "lost"
    assert scene.release(token).case == "lost"
    assert scene.record().state is State.STARTED


def test_a_child_about_to_be_killed_keeps_others_out_till_then(scene: Scene) -> None:
    scene.started()

    answer = scene.abandon(grace_ms=100)

    assert scene.record().at_ms == answer.now_ms + 100
    assert scene.begin(task_id=SECOND).case == "held"
    eventually(lambda: scene.begin(task_id=SECOND).case == "begun")


def test_a_lease_gets_no_longer_by_it(scene: Scene) -> None:
    running = scene.started(lease_ms=1000)

    scene.abandon(grace_ms=LEASE_MS)

    assert scene.record().at_ms == running.at_ms


def test_the_record_is_remembered_as_long_as_before(scene: Scene) -> None:
    scene.started()
    before = scene.left_ms()

    scene.abandon()

    assert before - 5000 < scene.left_ms() <= before


def test_what_the_record_knows_stays(scene: Scene) -> None:
    running = scene.started()
    scene.step(running.token)

    scene.abandon()

    record = scene.record()
    assert (record.attempt, record.task_id, record.worker) == (1, FIRST, WORKER)
    assert record.fingerprint == running.fingerprint
    assert "reserve" in scene.steps


@pytest.mark.parametrize(
    ("task_id", "worker"),
    [(SECOND, WORKER), (FIRST, OTHER_WORKER), (SECOND, OTHER_WORKER)],
    ids=["other-task", "other-child", "both"],
)
def test_nobody_elses_lease_is_touched(scene: Scene, task_id: str, worker: str) -> None:
    running = scene.started()

    answer = scene.abandon(task_id, worker)

    assert (answer.case, answer.record) == ("lost", running)
    assert scene.record() == running


def test_a_second_time_does_no_harm(scene: Scene) -> None:
    scene.started()
    scene.abandon()

    assert scene.abandon().case == "ok"
    assert scene.begin().there.attempt == 2


def test_a_second_time_after_a_takeover_is_too_late(scene: Scene) -> None:
    scene.started()
    scene.abandon()
    heir = scene.started(worker=OTHER_WORKER)

    assert scene.abandon().case == "lost"
    assert scene.record() == heir


def test_an_outcome_is_not_touched(scene: Scene) -> None:
    done = scene.completed()

    assert scene.abandon()[:2] == ("lost", done)
    assert scene.record() == done


def test_a_reservation_is_not_touched(scene: Scene) -> None:
    held = scene.held_for_retry()

    assert scene.abandon().case == "lost"
    assert scene.record() == held


def test_an_absent_key_stays_so(scene: Scene) -> None:
    assert scene.abandon()[:2] == ("lost", None)
    assert scene.raw is None


def test_a_child_with_a_long_name_is_found(scene: Scene) -> None:
    worker = "celery@" + "h" * 300 + "/4711"
    scene.started(worker=worker)

    assert scene.abandon(FIRST, worker).case == "ok"
