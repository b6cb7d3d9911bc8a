"""save_step stores finished steps; continuation is the right to send what follows an outcome."""

from __future__ import annotations

from typing import Any

from celery_idempotent.record import steps
from celery_idempotent.record.record import State
from tests.store.record_harness import (
    LEASE_MS,
    OTHER_WORKER,
    OWNER,
    RETENTION_MS,
    SECOND,
    RecordHarness,
)

THIRD = "33333333-3333-4333-8333-333333333333"
#: Another execution id.
THIS = b"another!"


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


class TestContinuation:
    def test_is_sent_by_one_delivery_at_a_time(self, harness: RecordHarness) -> None:
        for given in (harness.sending, harness.sending_error):
            harness.client.delete(harness.name)
            done = given()
            assert done.sending

            assert harness.begin(continues=True).case == "held"
            assert harness.mark_continued().case == "ok"

            noted = harness.record()
            assert not noted.sending
            assert (noted.state, noted.body, noted.token) == (done.state, done.body, done.token)
            assert noted.at_ms == done.at_ms
            assert harness.begin(continues=True).case == "sent"

    def test_is_taken_over_when_its_lease_has_ended(self, harness: RecordHarness) -> None:
        for given in (harness.sending, harness.sending_error):
            harness.client.delete(harness.name)
            given()
            assert harness.renew_continuation(lease_ms=0).case == "ok"

            taken = harness.begin(execution_id=THIS, continues=True)

            assert (taken.case, taken.stored.sending) == ("finished", True)
            assert harness.mark_continued()[0] == "lost"
            assert harness.renew_continuation()[0] == "lost"
            assert harness.renew_continuation(THIS).case == "ok"
            assert harness.begin(continues=True).case == "held"

    def test_is_taken_over_from_a_process_that_has_died(self, harness: RecordHarness) -> None:
        harness.sending()
        assert harness.abandon(worker=OTHER_WORKER).case == "lost"
        assert harness.begin(continues=True).case == "held"

        assert harness.abandon().case == harness.abandon().case == "sending"

        assert harness.begin(continues=True).case == "finished"

    def test_is_found_again_by_a_message_that_was_put_back(self, harness: RecordHarness) -> None:
        harness.sending()

        assert harness.begin(unanswered_ids=OWNER, continues=True).case == "finished"

    def test_of_a_duplicate_is_its_own(self, harness: RecordHarness) -> None:
        harness.completed()
        second: dict[str, Any] = {"task_id": SECOND, "continues": True}

        assert harness.begin(**second, execution_id=THIS).case == "finished"
        assert harness.begin(**second).case == "held"
        assert harness.begin(task_id=SECOND).case == "finished", "it has no continuation"
        assert harness.mark_continued(THIS, SECOND).case == "ok"
        assert harness.begin(**second).case == "sent"
        assert harness.begin(task_id=THIRD, continues=True).case == "finished"

    def test_twice_is_once(self, harness: RecordHarness) -> None:
        for given in (harness.sending, harness.sending_error):
            harness.client.delete(harness.name)
            given()
            harness.mark_continued()
            before = harness.raw

            assert harness.mark_continued().case == "ok"
            assert harness.renew_continuation().case == "lost"
            assert harness.raw == before

    def test_changes_no_retention(self, harness: RecordHarness) -> None:
        harness.sending()
        before = harness.left_ms()

        harness.mark_continued()

        assert before - 5000 < harness.left_ms() <= before

    def test_is_too_early_before_there_is_an_outcome(self, harness: RecordHarness) -> None:
        for given in (harness.started, harness.reserved):
            harness.client.delete(harness.name)
            given()
            before = harness.raw
            assert harness.mark_continued().case == "lost"
            assert harness.raw == before

    def test_of_an_absent_key_is_lost(self, harness: RecordHarness) -> None:
        assert harness.mark_continued()[:2] == ("lost", None)
