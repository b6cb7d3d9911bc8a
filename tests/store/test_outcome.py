"""complete and fail: the first outcome wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    RESULT,
    RETENTION_MS,
    SECOND,
    WORKER,
    Answer,
    Scene,
)

pytestmark = pytest.mark.core

Settle = Callable[[Scene, int], Answer]

ways = pytest.mark.parametrize(
    ("settle", "state", "outcome", "kept_ms"),
    [
        (Scene.complete, State.COMPLETED, RESULT, RETENTION_MS),
        (Scene.fail, State.FAILED, ERROR, ERROR_MS),
    ],
    ids=["complete", "fail"],
)


@ways
class TestBoth:
    def test_store_the_outcome(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = scene.started()

        answer = settle(scene, running.token)

        record = scene.record()
        assert answer.case == "ok"
        assert record.state is state
        assert (record.format, record.body) == outcome
        assert (record.token, record.attempt) == (running.token, 1)
        assert (record.task_id, record.worker) == (FIRST, WORKER)
        assert record.at_ms == answer.now_ms
        assert not record.continued

    def test_keep_it_as_long_as_told(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        settle(scene, scene.started().token)

        assert kept_ms - 5000 < scene.left_ms() <= kept_ms

    def test_answer_the_same_when_sent_again(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = scene.started()
        settle(scene, running.token)
        before = scene.raw

        assert settle(scene, running.token).case == "ok"
        assert scene.raw == before

    def test_are_good_after_the_lease_while_nobody_took_over(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = scene.expired()

        assert settle(scene, running.token).case == "ok"

    def test_are_refused_when_a_rival_runs(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        stale = scene.expired()
        rival = scene.started(task_id=SECOND)

        answer = settle(scene, stale.token)

        assert (answer.case, answer.record) == ("lost", rival)
        assert scene.record() == rival

    @pytest.mark.parametrize("rivals", [Scene.complete, Scene.fail], ids=["completed", "failed"])
    def test_are_refused_with_the_outcome_of_a_rival_that_came_first(
        self,
        scene: Scene,
        settle: Settle,
        state: State,
        outcome: Payload,
        kept_ms: int,
        rivals: Callable[[Scene, int, Payload], Answer],
    ) -> None:
        stale = scene.expired()
        rivals(scene, scene.started(task_id=SECOND).token, Payload("json", b"the rival's"))

        answer = settle(scene, stale.token)

        assert answer.case == "lost"
        assert answer.there.state.finished
        assert answer.there.body == b"the rival's"
        assert scene.record() == answer.record

    def test_are_refused_when_the_key_is_absent(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = scene.started()
        scene.forget()

        assert settle(scene, running.token)[:2] == ("lost", None)
        assert scene.raw is None

    def test_are_refused_after_the_key_was_given_back(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        held = scene.held_for_retry()

        answer = settle(scene, held.token)

        assert (answer.case, answer.record) == ("lost", held)

    def test_are_refused_to_a_neighbouring_token(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = scene.started()

        for other in (running.token - 1, running.token + 1, 0):
            assert settle(scene, other).case == "lost"
        assert scene.record() == running

    def test_end_the_steps(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = scene.started()
        scene.step(running.token)

        settle(scene, running.token)

        assert scene.record().body == outcome.body

    def test_hold_any_bytes(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        body = bytes(range(256)) * 4096

        settle_with = Scene.complete if state is State.COMPLETED else Scene.fail
        settle_with(scene, scene.started().token, Payload("json+gzip", body))

        assert (scene.record().format, scene.record().body) == ("json+gzip", body)

    def test_can_do_without_a_value(
        self, scene: Scene, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        settle_with = Scene.complete if state is State.COMPLETED else Scene.fail
        settle_with(scene, scene.started().token, Payload("", b"why not"))

        assert (scene.record().format, scene.record().body) == ("", b"why not")


def test_one_outcome_is_not_the_others_resend(scene: Scene) -> None:
    token = scene.completed().token

    assert scene.fail(token).case == "lost"
    assert scene.record().state is State.COMPLETED
