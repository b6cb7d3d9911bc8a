"""An error that ends one task id and not the key: copies of its message get it, others run."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    HOLD_MS,
    LEASE_MS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    RETENTION_MS,
    SECOND,
    WORKER,
    Scene,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core

THIRD = "33333333-3333-4333-8333-333333333333"
LATE = Payload("json", b'{"exc_type": "TimeoutError"}')


def by_release(scene: Scene) -> None:
    scene.end_with_error(scene.started().token)


def by_a_death(scene: Scene) -> None:
    scene.started()
    scene.abandon(error=ERROR)


either = pytest.mark.parametrize("ended", [by_release, by_a_death], ids=lambda how: how.__name__)


class TestACopyOfTheMessage:
    @either
    def test_gets_the_error(self, scene: Scene, ended: Any) -> None:
        ended(scene)
        before = scene.raw

        answer = scene.begin()

        assert answer.case == "finished"
        assert (answer.there.state, answer.there.task_id) == (State.FAILED, FIRST)
        assert (answer.there.format, answer.there.body) == (ERROR.format, ERROR.body)
        assert not answer.there.continued
        assert scene.raw == before

    @either
    def test_gets_it_while_another_task_id_runs_and_after_that_has_ended_so(
        self, scene: Scene, ended: Any
    ) -> None:
        ended(scene)
        rival = scene.started(task_id=SECOND)
        assert scene.begin().there.body == ERROR.body

        scene.end_with_error(rival.token, LATE)

        assert scene.begin().there.body == ERROR.body
        assert scene.begin(task_id=SECOND).there.body == LATE.body
        assert scene.begin(task_id=THIRD).case == "begun"

    @either
    def test_gets_it_whatever_arguments_came_since(self, scene: Scene, ended: Any) -> None:
        ended(scene)
        scene.started(task_id=SECOND, key=OTHER_ARGUMENTS)

        assert scene.begin().case == "finished"

    def test_gets_the_outcome_once_there_is_one(self, scene: Scene) -> None:
        by_release(scene)
        scene.complete(scene.started(task_id=SECOND).token)

        answer = scene.begin()

        assert (answer.case, answer.there.state) == ("finished", State.COMPLETED)

    def test_is_told_that_the_continuation_has_gone_out(self, scene: Scene) -> None:
        by_release(scene)

        assert scene.dispatched(SECOND).case == "lost"
        assert scene.dispatched().case == "ok"
        assert scene.dispatched().case == "ok"
        scene.started(task_id=SECOND)

        assert scene.begin().there.continued

    def test_is_told_so_though_another_has_begun_meanwhile(self, scene: Scene) -> None:
        by_release(scene)
        running = scene.started(task_id=SECOND)

        assert scene.dispatched().case == "ok"
        assert scene.begin().there.continued
        assert scene.record().token == running.token

    def test_of_an_earlier_message_gets_it_and_a_later_message_runs(self, scene: Scene) -> None:
        scene.end_with_error(scene.started(generation=2).token, generation=2)

        assert scene.begin(generation=1).case == "finished"
        assert scene.begin(generation=2).case == "finished"
        assert scene.begin(generation=3).case == "begun"


class TestOthers:
    @either
    def test_begin(self, scene: Scene, ended: Any) -> None:
        ended(scene)
        last = scene.record().token

        answer = scene.begin(task_id=SECOND)

        assert answer.case == "begun"
        assert answer.token > last

    @either
    def test_may_have_other_arguments(self, scene: Scene, ended: Any) -> None:
        ended(scene)

        assert scene.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "begun"

    @either
    def test_reserve(self, scene: Scene, ended: Any) -> None:
        ended(scene)

        assert scene.reserve(SECOND).case == "reserved"
        assert scene.begin(task_id=THIRD).case == "held"
        assert scene.begin(task_id=SECOND).case == "begun"

    @either
    def test_see_no_record(self, scene: Scene, ended: Any) -> None:
        ended(scene)

        assert scene.store.look_up(scene.key) is None

    def test_who_end_without_an_error_leave_it(self, scene: Scene) -> None:
        by_release(scene)
        running = scene.started(task_id=SECOND)

        scene.release(running.token)

        assert scene.store.look_up(scene.key) is None
        assert scene.begin().case == "finished"
        assert scene.begin(task_id=SECOND).case == "begun"

    def test_whose_reservation_is_over_have_no_arguments_any_more(self, scene: Scene) -> None:
        by_release(scene)
        scene.reserve(SECOND, hold_ms=1)
        eventually(lambda: scene.now_ms() >= scene.record().at_ms)

        assert scene.begin(task_id=THIRD, key=OTHER_ARGUMENTS).case == "begun"


class TestAnExplicitPublish:
    """Of the same task id, under a reservation."""

    def test_runs(self, scene: Scene) -> None:
        by_release(scene)

        assert scene.reserve().case == "reserved"
        running = scene.begin()
        assert running.case == "begun"
        assert scene.begin().case == "held"
        assert scene.complete(running.token).case == "ok"

    def test_that_is_given_back_leaves_the_error(self, scene: Scene) -> None:
        by_release(scene)
        scene.reserve()

        scene.reserve(hold_ms=0)

        assert scene.store.look_up(scene.key) is None
        assert scene.begin().case == "finished"


class TestTheRecord:
    def test_is_nobodys(self, scene: Scene) -> None:
        running = scene.started()

        assert scene.end_with_error(running.token).case == "ok"

        before = scene.raw
        assert scene.end_with_error(running.token).case == "ok"  # sent again
        for refused in (scene.complete, scene.fail, scene.extend, scene.step):
            assert refused(running.token).case == "lost"
        assert scene.raw == before

    def test_is_kept_as_long_as_an_error_is(self, scene: Scene) -> None:
        by_release(scene)

        assert ERROR_MS - 5000 < scene.left_ms() <= ERROR_MS

    def test_is_kept_as_long_as_steps_are(self, scene: Scene) -> None:
        running = scene.started()
        scene.step(running.token)

        scene.end_with_error(running.token)

        assert RETENTION_MS - 5000 < scene.left_ms() <= RETENTION_MS

    def test_is_kept_as_long_as_an_error_is_where_steps_are_kept_for_less(
        self, scene: Scene
    ) -> None:
        running = scene.started()
        scene.step(running.token)

        scene.end_with_error(running.token, error_ms=2 * RETENTION_MS)

        assert 2 * RETENTION_MS - 5000 < scene.left_ms() <= 2 * RETENTION_MS

    def test_keeps_finished_steps_for_whoever_comes_next(self, scene: Scene) -> None:
        running = scene.started()
        scene.step(running.token)
        scene.end_with_error(running.token)

        assert scene.state is State.RESERVED
        assert scene.steps == {"reserve": ("json", b'"r-1"')}
        assert scene.begin().case == "finished"
        assert scene.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "reused"
        heir = scene.started(task_id=SECOND)
        scene.step(heir.token, "ship", b"2")
        assert scene.steps == {"reserve": ("json", b'"r-1"'), "ship": ("json", b"2")}

    def test_has_room_for_so_many(self, scene: Scene) -> None:
        large = Payload("json", b"x" * 7_000)
        ids = [FIRST, SECOND, THIRD, "4"]
        for task_id in ids:
            scene.end_with_error(scene.started(task_id=task_id).token, large)

        kept = steps.errors(scene.record().body, "key")

        assert kept == [tuple(large)] * 3
        assert [scene.begin(task_id=task_id).case for task_id in ids[1:]] == ["finished"] * 3
        assert scene.begin(task_id=FIRST).case == "begun"


class TestADeath:
    def test_is_counted(self, scene: Scene) -> None:
        for attempt, task_id in enumerate([FIRST, SECOND], 1):
            assert scene.started(task_id=task_id, max_attempts=2).attempt == attempt
            scene.abandon(task_id, error=ERROR)

        answer = scene.begin(task_id=THIRD, max_attempts=2)

        assert answer.case == "finished"
        assert (answer.there.state, answer.there.body) == (State.FAILED, b"poisoned")

    def test_is_counted_past_a_reservation(self, scene: Scene) -> None:
        by_a_death(scene)
        scene.reserve(SECOND)

        assert scene.started(task_id=SECOND).attempt == 2

    def test_lets_nobody_in_while_the_child_may_live(self, scene: Scene) -> None:
        child = scene.started()

        scene.abandon(grace_ms=LEASE_MS, error=ERROR)

        assert scene.begin().case == "finished"
        assert scene.begin(task_id=SECOND).case == "held"
        assert scene.begin(generation=1).case == "held"
        assert scene.reserve(SECOND).case == scene.reserve().case == "held"
        assert scene.complete(child.token).case == "lost"

    def test_that_is_told_again_changes_nothing(self, scene: Scene) -> None:
        scene.started()
        scene.abandon(error=ERROR)
        before = scene.raw

        assert scene.abandon(error=ERROR).case == "ok"
        assert scene.raw == before
        assert scene.abandon(worker=OTHER_WORKER, error=ERROR).case == "lost"
        assert scene.record().worker == WORKER


class TestARetry:
    def test_is_awaited_though_a_copy_of_the_message_before_it_comes(self, scene: Scene) -> None:
        scene.release(scene.started().token, HOLD_MS, generation=1)

        assert scene.begin(generation=0).case == "held"
        assert scene.begin(generation=1).case == "begun"

    def test_that_never_comes_lets_the_copy_in(self, scene: Scene) -> None:
        running = scene.started()
        scene.step(running.token)
        scene.release(running.token, 1, generation=1)
        eventually(lambda: scene.now_ms() >= scene.record().at_ms)

        assert scene.begin(generation=0).case == "begun"
