"""save_step stores finished steps; mark_continued notes that the continuation was sent."""

from __future__ import annotations

from celery_idempotent.record import steps
from celery_idempotent.record.record import State
from tests.store.record_harness import FIRST, LEASE_MS, RETENTION_MS, SECOND, RecordHarness


class TestStep:
    def test_is_stored_after_the_others(self, harness: RecordHarness) -> None:
        token = harness.started().token

        assert harness.save_step(token, "one", b"1").case == "ok"
        assert harness.save_step(token, "two", b"\0\xff").case == "ok"

        assert harness.steps == {"one": ("json", b"1"), "two": ("json", b"\0\xff")}
        assert harness.record().state is State.STARTED

    def test_sent_again_is_stored_once(self, harness: RecordHarness) -> None:
        token = harness.started().token

        harness.save_step(token, "one", b"1")
        assert harness.save_step(token, "one", b"1").case == "ok"

        assert harness.record().body == steps.write("one", "json", b"1")

    def test_extends_the_lease(self, harness: RecordHarness) -> None:
        token = harness.started(lease_ms=1000).token

        reply = harness.save_step(token)

        assert harness.record().at_ms == reply.now_ms + LEASE_MS
        assert LEASE_MS + RETENTION_MS - 5000 < harness.left_ms() <= LEASE_MS + RETENTION_MS

    def test_is_returned_to_a_takeover(self, harness: RecordHarness) -> None:
        harness.save_step(harness.started().token)
        harness.abandon()

        successor = harness.begin(task_id=SECOND).stored

        assert successor.attempt == 2
        assert steps.read(successor.body, "k") == {"reserve": ("json", b'"r-1"')}

    def test_is_returned_to_the_same_execution_again(self, harness: RecordHarness) -> None:
        execution_id = b"an execution id!"
        harness.save_step(harness.started(execution_id=execution_id).token)

        assert b"reserve" in harness.begin(execution_id=execution_id).stored.body

    def test_is_refused_to_a_stale_execution(self, harness: RecordHarness) -> None:
        stale = harness.expired()
        successor = harness.started(task_id=SECOND)

        reply = harness.save_step(stale.token)

        assert (reply.case, reply.record) == ("lost", successor)
        assert harness.record() == successor

    def test_is_refused_when_the_key_is_absent(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.forget()

        assert harness.save_step(running.token)[:2] == ("lost", None)


class TestMarkContinued:
    def test_is_noted_on_either_outcome(self, harness: RecordHarness) -> None:
        for given in (harness.completed, harness.failed):
            harness.client.delete(harness.name)
            done = given()
            assert not done.continuation_sent

            assert harness.mark_continued().case == "ok"

            noted = harness.record()
            assert noted.continuation_sent
            assert (noted.state, noted.body, noted.token) == (done.state, done.body, done.token)

    def test_twice_is_once(self, harness: RecordHarness) -> None:
        for given in (harness.completed, harness.failed):
            harness.client.delete(harness.name)
            given()
            harness.mark_continued()
            before = harness.raw

            assert harness.mark_continued().case == "ok"
            assert harness.raw == before

    def test_changes_no_retention(self, harness: RecordHarness) -> None:
        harness.completed()
        before = harness.left_ms()

        harness.mark_continued()

        assert before - 5000 < harness.left_ms() <= before

    def test_is_for_the_task_id_that_has_the_outcome(self, harness: RecordHarness) -> None:
        done = harness.completed()

        assert harness.mark_continued(SECOND)[:2] == ("lost", done)
        assert harness.record() == done

    def test_is_too_early_before_there_is_an_outcome(self, harness: RecordHarness) -> None:
        for given in (harness.started, harness.reserved):
            harness.client.delete(harness.name)
            given()
            before = harness.raw
            assert harness.mark_continued(FIRST).case == "lost"
            assert harness.raw == before

    def test_of_an_absent_key_is_lost(self, harness: RecordHarness) -> None:
        assert harness.mark_continued()[:2] == ("lost", None)
