"""release: the key is free again, or held for a retry."""

from __future__ import annotations

import pytest

from celery_idempotent.record.record import State
from tests.store.record_harness import FIRST, HOLD_MS, RETENTION_MS, SECOND, Scene

pytestmark = pytest.mark.core


class TestFree:
    def test_the_key_is_absent(self, scene: Scene) -> None:
        running = scene.started()

        assert scene.release(running.token).case == "ok"
        assert scene.raw is None

    def test_the_same_answer_comes_again(self, scene: Scene) -> None:
        running = scene.started()
        scene.release(running.token)

        assert scene.release(running.token).case == "ok"

    def test_a_key_that_nobody_holds_is_free(self, scene: Scene) -> None:
        running = scene.started()
        scene.forget()

        assert scene.release(running.token).case == "ok"

    def test_attempts_start_afresh(self, scene: Scene) -> None:
        scene.expired()
        second = scene.started()

        scene.release(second.token)

        assert scene.begin().there.attempt == 1


class TestHeld:
    def test_the_key_is_reserved_for_the_same_task_id(self, scene: Scene) -> None:
        running = scene.started()

        answer = scene.release(running.token, HOLD_MS)

        record = scene.record()
        assert answer.case == "ok"
        assert record.state is State.RESERVED
        assert record.task_id == FIRST
        assert record.at_ms == answer.now_ms + HOLD_MS
        assert (record.token, record.attempt) == (running.token, 0)
        assert HOLD_MS - 5000 < scene.left_ms() <= HOLD_MS

    def test_the_same_answer_comes_again(self, scene: Scene) -> None:
        running = scene.started()
        scene.release(running.token, HOLD_MS)
        before = scene.raw

        assert scene.release(running.token, HOLD_MS).case == "ok"
        assert scene.raw == before

    def test_the_retry_begins_and_a_duplicate_does_not(self, scene: Scene) -> None:
        scene.release(scene.started().token, HOLD_MS)

        assert scene.begin(task_id=SECOND).case == "held"
        assert scene.begin().case == "begun"


@pytest.mark.parametrize("hold_ms", [0, HOLD_MS], ids=["free", "hold"])
class TestLost:
    def test_to_a_rival_that_runs(self, scene: Scene, hold_ms: int) -> None:
        stale = scene.expired()
        rival = scene.started(task_id=SECOND)

        answer = scene.release(stale.token, hold_ms)

        assert (answer.case, answer.record) == ("lost", rival)
        assert scene.record() == rival

    def test_to_an_outcome(self, scene: Scene, hold_ms: int) -> None:
        stale = scene.expired()
        scene.complete(scene.started(task_id=SECOND).token)

        answer = scene.release(stale.token, hold_ms)

        assert answer.case == "lost"
        assert answer.there.state is State.COMPLETED
        assert scene.record() == answer.record

    def test_to_a_rivals_reservation(self, scene: Scene, hold_ms: int) -> None:
        stale = scene.expired()
        scene.release(scene.started(task_id=SECOND).token, HOLD_MS)

        answer = scene.release(stale.token, hold_ms)

        assert answer.case == "lost"
        assert answer.there.task_id == SECOND


class TestWithSteps:
    def test_they_outlive_the_release(self, scene: Scene) -> None:
        running = scene.started()
        scene.step(running.token)

        scene.release(running.token)

        assert scene.steps == {"reserve": ("json", b'"r-1"')}
        assert RETENTION_MS - 5000 < scene.left_ms() <= RETENTION_MS

    def test_the_key_is_free_all_the_same(self, scene: Scene) -> None:
        running = scene.started()
        scene.step(running.token)
        scene.release(running.token)

        answer = scene.begin(task_id=SECOND)

        assert (answer.case, answer.there.attempt) == ("begun", 1)
        assert "reserve" in scene.steps

    def test_a_hold_keeps_them_past_its_end(self, scene: Scene) -> None:
        running = scene.started()
        scene.step(running.token)

        scene.release(running.token, HOLD_MS)

        assert "reserve" in scene.steps
        assert scene.left_ms() > RETENTION_MS
        assert scene.begin(task_id=SECOND).case == "held"
