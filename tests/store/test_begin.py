"""begin: who gets the right to run."""

from __future__ import annotations

import os

import pytest

from celery_idempotent.record.record import State
from tests.store.record_harness import (
    ERROR_MS,
    FIRST,
    HOLD_MS,
    LEASE_MS,
    NO_ARGUMENTS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    RESULT,
    SECOND,
    SHORT_MS,
    WORKER,
    Scene,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core


class TestAbsent:
    def test_begins(self, scene: Scene) -> None:
        answer = scene.begin()

        assert answer.case == "begun"
        assert answer.record == scene.record()
        assert answer.there.state is State.STARTED
        assert answer.there.attempt == 1
        assert (answer.there.task_id, answer.there.worker) == (FIRST, WORKER)
        assert answer.there.fingerprint == scene.key.fingerprint

    def test_gets_a_lease_from_now_by_the_servers_clock(self, scene: Scene) -> None:
        before = scene.now_ms()
        answer = scene.begin()
        after = scene.now_ms()

        assert before <= answer.now_ms <= after
        assert answer.there.at_ms == answer.now_ms + LEASE_MS

    def test_a_worker_of_any_name_can_begin_and_be_read_back(self, scene: Scene) -> None:
        long = "celery@" + "é" * 200 + "x/4711"

        answer = scene.begin(worker=long)

        assert long.endswith(answer.there.worker)
        assert len(answer.there.worker.encode()) >= 250


class TestStarted:
    def test_a_duplicate_is_held_off_and_sees_who_runs(self, scene: Scene) -> None:
        running = scene.started()

        answer = scene.begin(task_id=SECOND, worker=OTHER_WORKER)

        assert answer.case == "held"
        assert answer.record == running == scene.record()

    def test_a_redelivery_with_the_same_task_id_is_held_off_too(self, scene: Scene) -> None:
        running = scene.started()

        assert scene.begin().case == "held"
        assert scene.record() == running

    def test_the_same_execution_gets_the_same_answer_again(self, scene: Scene) -> None:
        owner = os.urandom(16)
        first = scene.started(owner=owner)

        again = scene.begin(owner=owner)

        assert again.case == "begun"
        assert (again.token, again.there.attempt) == (first.token, 1)
        assert scene.complete(first.token).case == "ok"

    def test_the_same_execution_gets_it_even_after_its_lease(self, scene: Scene) -> None:
        owner = os.urandom(16)
        first = scene.expired(owner=owner)

        again = scene.begin(owner=owner)

        assert (again.case, again.token, again.there.attempt) == ("begun", first.token, 1)
        assert again.there.at_ms == again.now_ms + LEASE_MS


class TestUnansweredBegin:
    """A message that was put back carries the ids of its passes that had no answer."""

    def test_is_stepped_into_at_once_without_counting_an_attempt(self, scene: Scene) -> None:
        owner = os.urandom(16)
        unanswered = scene.started(owner=owner)

        answer = scene.begin(prior=owner)

        assert answer.case == "begun"
        assert answer.there.attempt == 1
        assert answer.token > unanswered.token

    def test_is_found_among_several(self, scene: Scene) -> None:
        owners = [os.urandom(16) for _ in range(5)]
        scene.started(owner=owners[2])

        assert scene.begin(prior=b"".join(owners)).case == "begun"

    def test_is_not_found_among_strangers(self, scene: Scene) -> None:
        scene.started()

        assert scene.begin(prior=os.urandom(80)).case == "held"

    def test_that_reaches_redis_late_cannot_complete(self, scene: Scene) -> None:
        owner = os.urandom(16)
        unanswered = scene.started(owner=owner)
        scene.started(prior=owner)

        assert scene.complete(unanswered.token).case == "lost"

    def test_does_not_use_up_attempts(self, scene: Scene) -> None:
        owner = os.urandom(16)
        scene.started(owner=owner, max_attempts=1)

        assert scene.begin(prior=owner, max_attempts=1).case == "begun"

    def test_is_no_way_into_a_dead_childs_lease(self, scene: Scene) -> None:
        # An abandoned record has no owner, and every text contains the empty one.
        owner = os.urandom(16)
        scene.started(owner=owner)
        scene.abandon(grace_ms=LEASE_MS)

        assert scene.begin(prior=os.urandom(16)).case == "held"


class TestExpired:
    def test_is_taken_over(self, scene: Scene) -> None:
        dead = scene.expired()

        answer = scene.begin(task_id=SECOND, worker=OTHER_WORKER)

        assert answer.case == "begun"
        assert answer.there.attempt == 2
        assert answer.token > dead.token
        assert (answer.there.task_id, answer.there.worker) == (SECOND, OTHER_WORKER)
        assert answer.there.at_ms == answer.now_ms + LEASE_MS

    def test_is_not_taken_over_a_moment_before(self, scene: Scene) -> None:
        running = scene.started(lease_ms=SHORT_MS)
        answers = []

        def begun() -> bool:
            answers.append(scene.begin())
            return answers[-1].case == "begun"

        eventually(begun)

        assert all(a.case == "held" and a.now_ms < running.at_ms for a in answers[:-1])
        assert answers[-1].now_ms >= running.at_ms

    def test_keeps_counting(self, scene: Scene) -> None:
        attempts = [scene.expired().attempt for _ in range(4)]

        assert attempts == [1, 2, 3, 4]

    def test_may_be_taken_over_by_the_same_message(self, scene: Scene) -> None:
        scene.expired()

        assert scene.begin().there.attempt == 2

    def test_after_too_many_deaths_is_failed_for_good(self, scene: Scene) -> None:
        for _ in range(3):
            last = scene.expired(max_attempts=3)

        answer = scene.begin(task_id=SECOND, worker=OTHER_WORKER, max_attempts=3)

        assert answer.case == "finished"
        assert answer.record == scene.record()
        assert answer.there.state is State.FAILED
        assert answer.there.attempt == 3
        assert (answer.there.format, answer.there.body) == ("", b"poisoned")
        assert answer.there.worker == WORKER, "the one that died last"
        assert ERROR_MS - 5000 < scene.left_ms() <= ERROR_MS
        assert answer.there.fingerprint == scene.key.fingerprint
        assert scene.complete(last.token).case == "lost"
        assert scene.begin().case == "finished"

    def test_may_die_255_times(self, scene: Scene) -> None:
        for _ in range(255):
            scene.started(max_attempts=255)
            scene.abandon()

        assert scene.record().attempt == 255
        assert scene.begin(max_attempts=255).there.state is State.FAILED
        assert scene.record().attempt == 255


class TestFinished:
    def test_gets_the_result(self, scene: Scene) -> None:
        scene.completed()

        answer = scene.begin(task_id=SECOND)

        assert answer.case == "finished"
        assert answer.there.state is State.COMPLETED
        assert (answer.there.format, answer.there.body) == RESULT
        assert answer.there.task_id == FIRST

    def test_gets_the_error(self, scene: Scene) -> None:
        scene.failed()

        assert scene.begin(task_id=SECOND).there.state is State.FAILED

    def test_is_left_as_it_is(self, scene: Scene) -> None:
        scene.completed()
        before, left = scene.raw, scene.left_ms()

        scene.begin()

        assert scene.raw == before
        assert scene.left_ms() <= left

    def test_stays_so_after_its_continuation_went_out(self, scene: Scene) -> None:
        scene.completed()
        scene.dispatched()

        assert scene.begin().case == "finished"
        assert scene.begin().there.continued


class TestReserved:
    def test_lets_its_task_id_begin_at_once(self, scene: Scene) -> None:
        reservation = scene.reserved()

        answer = scene.begin()

        assert (answer.case, answer.there.attempt) == ("begun", 1)
        assert answer.token > reservation.token

    def test_holds_every_other_task_id_off(self, scene: Scene) -> None:
        reservation = scene.reserved()

        answer = scene.begin(task_id=SECOND)

        assert answer.case == "held"
        assert answer.record == reservation
        assert answer.there.deadline is not None
        assert answer.there.at_ms <= answer.now_ms + HOLD_MS

    def test_is_free_to_all_after_its_time(self, scene: Scene) -> None:
        assert scene.reserve(hold_ms=SHORT_MS).case == "reserved"
        eventually(lambda: scene.begin(task_id=SECOND).case == "begun")

        assert scene.record().attempt == 1

    def test_by_a_retry_counts_no_attempt(self, scene: Scene) -> None:
        scene.expired()
        scene.expired()
        scene.release(scene.started().token, HOLD_MS)

        assert scene.begin().there.attempt == 1


class TestReused:
    def test_in_every_state(self, scene: Scene) -> None:
        for given in (
            scene.started,
            scene.expired,
            scene.reserved,
            scene.held_for_retry,
            scene.completed,
            scene.failed,
            scene.poisoned,
        ):
            scene.client.delete(scene.name)
            given()
            before = scene.raw

            answer = scene.begin(key=OTHER_ARGUMENTS)

            assert answer.case == "reused", given.__name__
            assert answer.there.task_id in (FIRST, SECOND)
            assert scene.raw == before

    def test_when_the_reservation_is_over(self, scene: Scene) -> None:
        # Finished steps keep a released record alive.
        token = scene.started().token
        scene.step(token)
        scene.release(token)

        assert scene.begin(key=OTHER_ARGUMENTS).case == "reused"

    def test_not_where_one_side_has_no_fingerprint(self, scene: Scene) -> None:
        scene.expired()

        assert scene.begin(key=NO_ARGUMENTS).case == "begun"
        assert scene.record().fingerprint == scene.key.fingerprint

    def test_a_record_without_a_fingerprint_gets_one(self, scene: Scene) -> None:
        scene.started(key=NO_ARGUMENTS)
        scene.abandon()

        scene.begin()

        assert scene.record().fingerprint == scene.key.fingerprint
