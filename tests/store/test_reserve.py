"""reserve: the key is kept for a task that is about to be published."""

from __future__ import annotations

from celery_idempotent.record.record import State
from tests.store.record_harness import (
    FIRST,
    HOLD_MS,
    NO_ARGUMENTS,
    OTHER_ARGUMENTS,
    RETENTION_MS,
    SECOND,
    Scene,
)


def test_an_absent_key_is_reserved(scene: Scene) -> None:
    answer = scene.reserve()

    record = scene.record()
    assert (answer.case, answer.record) == ("reserved", record)
    assert record.state is State.RESERVED
    assert (record.task_id, record.worker, record.attempt) == (FIRST, "", 0)
    assert record.at_ms == answer.now_ms + HOLD_MS
    assert record.fingerprint == scene.key.fingerprint
    assert HOLD_MS - 5000 < scene.left_ms() <= HOLD_MS


def test_a_key_that_is_reserved_is_held_for_the_first(scene: Scene) -> None:
    first = scene.reserved()

    answer = scene.reserve(SECOND)

    assert (answer.case, answer.record) == ("held", first)
    assert scene.record() == first


def test_the_same_task_id_may_reserve_again(scene: Scene) -> None:
    first = scene.reserved()

    again = scene.reserve()

    assert again.case == "reserved"
    assert again.token > first.token


def test_a_key_that_runs_is_held(scene: Scene) -> None:
    running = scene.started()

    for task_id in (FIRST, SECOND):
        answer = scene.reserve(task_id)
        assert (answer.case, answer.record) == ("held", running)
    assert scene.record() == running


def test_a_dead_executions_key_is_left_to_be_taken_over(scene: Scene) -> None:
    dead = scene.expired()

    answer = scene.reserve(SECOND)

    assert (answer.case, answer.record) == ("expired", dead)
    assert scene.begin(task_id=SECOND).there.attempt == 2


def test_a_finished_key_answers_with_its_outcome(scene: Scene) -> None:
    for given in (scene.completed, scene.failed, scene.poisoned):
        scene.client.delete(scene.name)
        done = given()

        answer = scene.reserve(SECOND)

        assert (answer.case, answer.record) == ("finished", done)
        assert scene.record() == done


def test_a_key_with_other_arguments_is_reused(scene: Scene) -> None:
    for given in (
        scene.started,
        scene.expired,
        scene.reserved,
        scene.held_for_retry,
        scene.completed,
        scene.failed,
    ):
        scene.client.delete(scene.name)
        given()
        before = scene.raw

        assert scene.reserve(key=OTHER_ARGUMENTS).case == "reused", given.__name__
        assert scene.raw == before


def test_one_side_without_a_fingerprint_is_no_reuse(scene: Scene) -> None:
    scene.reserved()

    assert scene.reserve(key=NO_ARGUMENTS).case == "reserved"
    assert scene.record().fingerprint == scene.key.fingerprint


def test_finished_steps_stay_for_the_retry(scene: Scene) -> None:
    running = scene.started()
    scene.step(running.token)
    scene.release(running.token, HOLD_MS)

    assert scene.reserve().case == "reserved"
    assert "reserve" in scene.steps
    assert scene.left_ms() > RETENTION_MS - 5000, "and longer than the reservation"
