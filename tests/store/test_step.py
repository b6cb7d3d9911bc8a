"""step and dispatched: what an execution has done so far, and what has gone out after it."""

from __future__ import annotations

from celery_idempotent.record import steps
from celery_idempotent.record.record import State
from tests.store.record_harness import FIRST, LEASE_MS, RETENTION_MS, SECOND, Scene


class TestStep:
    def test_is_kept_behind_the_others(self, scene: Scene) -> None:
        token = scene.started().token

        assert scene.step(token, "one", b"1").case == "ok"
        assert scene.step(token, "two", b"\0\xff").case == "ok"

        assert scene.steps == {"one": ("json", b"1"), "two": ("json", b"\0\xff")}
        assert scene.record().state is State.STARTED

    def test_sent_again_is_kept_once(self, scene: Scene) -> None:
        token = scene.started().token

        scene.step(token, "one", b"1")
        assert scene.step(token, "one", b"1").case == "ok"

        assert scene.record().body == steps.write("one", "json", b"1")

    def test_is_a_life_sign(self, scene: Scene) -> None:
        token = scene.started(lease_ms=1000).token

        answer = scene.step(token)

        assert scene.record().at_ms == answer.now_ms + LEASE_MS
        assert LEASE_MS + RETENTION_MS - 5000 < scene.left_ms() <= LEASE_MS + RETENTION_MS

    def test_is_known_to_whoever_takes_over(self, scene: Scene) -> None:
        scene.step(scene.started().token)
        scene.abandon()

        heir = scene.begin(task_id=SECOND).there

        assert heir.attempt == 2
        assert steps.read(heir.body, "k") == {"reserve": ("json", b'"r-1"')}

    def test_is_known_to_the_same_execution_again(self, scene: Scene) -> None:
        owner = b"an execution id!"
        scene.step(scene.started(owner=owner).token)

        assert b"reserve" in scene.begin(owner=owner).there.body

    def test_is_refused_to_a_stale_execution(self, scene: Scene) -> None:
        stale = scene.expired()
        rival = scene.started(task_id=SECOND)

        answer = scene.step(stale.token)

        assert (answer.case, answer.record) == ("lost", rival)
        assert scene.record() == rival

    def test_is_refused_when_the_key_is_absent(self, scene: Scene) -> None:
        running = scene.started()
        scene.forget()

        assert scene.step(running.token)[:2] == ("lost", None)


class TestDispatched:
    def test_is_noted_on_either_outcome(self, scene: Scene) -> None:
        for given in (scene.completed, scene.failed):
            scene.client.delete(scene.name)
            done = given()
            assert not done.continued

            assert scene.dispatched().case == "ok"

            noted = scene.record()
            assert noted.continued
            assert (noted.state, noted.body, noted.token) == (done.state, done.body, done.token)

    def test_twice_is_once(self, scene: Scene) -> None:
        for given in (scene.completed, scene.failed):
            scene.client.delete(scene.name)
            given()
            scene.dispatched()
            before = scene.raw

            assert scene.dispatched().case == "ok"
            assert scene.raw == before

    def test_changes_no_retention(self, scene: Scene) -> None:
        scene.completed()
        before = scene.left_ms()

        scene.dispatched()

        assert before - 5000 < scene.left_ms() <= before

    def test_is_for_the_task_id_that_has_the_outcome(self, scene: Scene) -> None:
        done = scene.completed()

        assert scene.dispatched(SECOND)[:2] == ("lost", done)
        assert scene.record() == done

    def test_is_too_early_before_there_is_an_outcome(self, scene: Scene) -> None:
        for given in (scene.started, scene.reserved):
            scene.client.delete(scene.name)
            given()
            before = scene.raw
            assert scene.dispatched(FIRST).case == "lost"
            assert scene.raw == before

    def test_of_an_absent_key_is_lost(self, scene: Scene) -> None:
        assert scene.dispatched()[:2] == ("lost", None)
