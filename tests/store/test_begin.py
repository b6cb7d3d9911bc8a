"""begin: which execution gets the right to run."""

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
    RecordHarness,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core


class TestAbsent:
    def test_begins(self, harness: RecordHarness) -> None:
        reply = harness.begin()

        assert reply.case == "begun"
        assert reply.record == harness.record()
        assert reply.stored.state is State.STARTED
        assert reply.stored.attempt == 1
        assert (reply.stored.task_id, reply.stored.worker) == (FIRST, WORKER)
        assert reply.stored.fingerprint == harness.key.fingerprint

    def test_gets_a_lease_from_now_by_the_servers_clock(self, harness: RecordHarness) -> None:
        before = harness.now_ms()
        reply = harness.begin()
        after = harness.now_ms()

        assert before <= reply.now_ms <= after
        assert reply.stored.at_ms == reply.now_ms + LEASE_MS

    def test_a_worker_name_of_any_length_can_be_read(self, harness: RecordHarness) -> None:
        long = "celery@" + "é" * 200 + "x/4711"

        reply = harness.begin(worker=long)

        assert long.endswith(reply.stored.worker)
        assert len(reply.stored.worker.encode()) >= 250


class TestStarted:
    def test_a_duplicate_gets_held_with_the_running_execution(self, harness: RecordHarness) -> None:
        running = harness.started()

        reply = harness.begin(task_id=SECOND, worker=OTHER_WORKER)

        assert reply.case == "held"
        assert reply.record == running == harness.record()

    def test_a_redelivery_with_the_same_task_id_gets_held_too(self, harness: RecordHarness) -> None:
        running = harness.started()

        assert harness.begin().case == "held"
        assert harness.record() == running

    def test_the_same_execution_gets_the_same_reply_again(self, harness: RecordHarness) -> None:
        execution_id = os.urandom(8)
        first = harness.started(execution_id=execution_id)

        again = harness.begin(execution_id=execution_id)

        assert again.case == "begun"
        assert (again.token, again.stored.attempt) == (first.token, 1)
        assert harness.complete(first.token).case == "ok"

    def test_the_same_execution_gets_the_same_reply_after_its_lease(
        self, harness: RecordHarness
    ) -> None:
        execution_id = os.urandom(8)
        first = harness.expired(execution_id=execution_id)

        again = harness.begin(execution_id=execution_id)

        assert (again.case, again.token, again.stored.attempt) == ("begun", first.token, 1)
        assert again.stored.at_ms == again.now_ms + LEASE_MS


class TestUnansweredBegin:
    """A message that is retried carries the execution ids of begins without a reply."""

    def test_is_continued_at_once_without_counting_an_attempt(self, harness: RecordHarness) -> None:
        execution_id = os.urandom(8)
        unanswered = harness.started(execution_id=execution_id)

        reply = harness.begin(unanswered_ids=execution_id)

        assert reply.case == "begun"
        assert reply.stored.attempt == 1
        assert reply.token > unanswered.token

    def test_is_found_among_several(self, harness: RecordHarness) -> None:
        owners = [os.urandom(8) for _ in range(5)]
        harness.started(execution_id=owners[2])

        assert harness.begin(unanswered_ids=b"".join(owners)).case == "begun"

    def test_is_not_recognised_by_other_ids(self, harness: RecordHarness) -> None:
        harness.started()

        assert harness.begin(unanswered_ids=os.urandom(80)).case == "held"

    def test_that_reaches_redis_late_cannot_complete(self, harness: RecordHarness) -> None:
        execution_id = os.urandom(8)
        unanswered = harness.started(execution_id=execution_id)
        harness.started(unanswered_ids=execution_id)

        assert harness.complete(unanswered.token).case == "lost"

    def test_does_not_use_up_attempts(self, harness: RecordHarness) -> None:
        execution_id = os.urandom(8)
        harness.started(execution_id=execution_id, max_attempts=1)

        assert harness.begin(unanswered_ids=execution_id, max_attempts=1).case == "begun"

    def test_does_not_continue_an_abandoned_execution(self, harness: RecordHarness) -> None:
        # An abandoned record has no execution id, and every text contains the empty one.
        execution_id = os.urandom(8)
        harness.started(execution_id=execution_id)
        harness.abandon(grace_ms=LEASE_MS)

        assert harness.begin(unanswered_ids=os.urandom(8)).case == "held"


class TestExpired:
    def test_is_taken_over(self, harness: RecordHarness) -> None:
        dead = harness.expired()

        reply = harness.begin(task_id=SECOND, worker=OTHER_WORKER)

        assert reply.case == "begun"
        assert reply.stored.attempt == 2
        assert reply.token > dead.token
        assert (reply.stored.task_id, reply.stored.worker) == (SECOND, OTHER_WORKER)
        assert reply.stored.at_ms == reply.now_ms + LEASE_MS

    def test_is_not_taken_over_before_its_deadline(self, harness: RecordHarness) -> None:
        running = harness.started(lease_ms=SHORT_MS)
        replies = []

        def begun() -> bool:
            replies.append(harness.begin())
            return replies[-1].case == "begun"

        eventually(begun)

        assert all(a.case == "held" and a.now_ms < running.at_ms for a in replies[:-1])
        assert replies[-1].now_ms >= running.at_ms

    def test_keeps_counting(self, harness: RecordHarness) -> None:
        attempts = [harness.expired().attempt for _ in range(4)]

        assert attempts == [1, 2, 3, 4]

    def test_may_be_taken_over_by_the_same_message(self, harness: RecordHarness) -> None:
        harness.expired()

        assert harness.begin().stored.attempt == 2

    def test_after_max_attempts_is_failed_as_poisoned(self, harness: RecordHarness) -> None:
        for _ in range(3):
            last = harness.expired(max_attempts=3)

        reply = harness.begin(task_id=SECOND, worker=OTHER_WORKER, max_attempts=3)

        assert reply.case == "finished"
        assert reply.record == harness.record()
        assert reply.stored.state is State.FAILED
        assert reply.stored.attempt == 3
        assert (reply.stored.format, reply.stored.body) == ("", b"poisoned")
        assert reply.stored.worker == WORKER, "the one that died last"
        assert ERROR_MS - 5000 < harness.left_ms() <= ERROR_MS
        assert reply.stored.fingerprint == harness.key.fingerprint
        assert harness.complete(last.token).case == "lost"
        assert harness.begin().case == "finished"

    def test_counts_up_to_255_attempts(self, harness: RecordHarness) -> None:
        for _ in range(255):
            harness.started(max_attempts=255)
            harness.abandon()

        assert harness.record().attempt == 255
        assert harness.begin(max_attempts=255).stored.state is State.FAILED
        assert harness.record().attempt == 255


class TestFinished:
    def test_gets_the_result(self, harness: RecordHarness) -> None:
        harness.completed()

        reply = harness.begin(task_id=SECOND)

        assert reply.case == "finished"
        assert reply.stored.state is State.COMPLETED
        assert (reply.stored.format, reply.stored.body) == RESULT
        assert reply.stored.task_id == FIRST

    def test_gets_the_error(self, harness: RecordHarness) -> None:
        harness.failed()

        assert harness.begin(task_id=SECOND).stored.state is State.FAILED

    def test_stays_unchanged(self, harness: RecordHarness) -> None:
        harness.completed()
        before, left = harness.raw, harness.left_ms()

        harness.begin()

        assert harness.raw == before
        assert harness.left_ms() <= left

    def test_stays_finished_after_its_continuation_was_sent(self, harness: RecordHarness) -> None:
        harness.sending()
        harness.mark_continued()

        assert harness.begin(continues=True).case == "sent"
        assert not harness.begin(continues=True).stored.sending


class TestReserved:
    def test_can_be_begun_by_its_task_id_at_once(self, harness: RecordHarness) -> None:
        reservation = harness.reserved()

        reply = harness.begin()

        assert (reply.case, reply.stored.attempt) == ("begun", 1)
        assert reply.token > reservation.token

    def test_is_held_for_every_other_task_id(self, harness: RecordHarness) -> None:
        reservation = harness.reserved()

        reply = harness.begin(task_id=SECOND)

        assert reply.case == "held"
        assert reply.record == reservation
        assert reply.stored.deadline is not None
        assert reply.stored.at_ms <= reply.now_ms + HOLD_MS

    def test_can_be_begun_by_any_task_id_after_its_end(self, harness: RecordHarness) -> None:
        assert harness.reserve(hold_ms=SHORT_MS).case == "reserved"
        eventually(lambda: harness.begin(task_id=SECOND).case == "begun")

        assert harness.record().attempt == 1

    def test_by_a_retry_counts_no_attempt(self, harness: RecordHarness) -> None:
        harness.expired()
        harness.expired()
        harness.release(harness.started().token, HOLD_MS)

        assert harness.begin().stored.attempt == 1


class TestReused:
    def test_in_every_state(self, harness: RecordHarness) -> None:
        for given in (
            harness.started,
            harness.expired,
            harness.reserved,
            harness.held_for_retry,
            harness.completed,
            harness.failed,
            harness.poisoned,
        ):
            harness.client.delete(harness.name)
            given()
            before = harness.raw

            reply = harness.begin(key=OTHER_ARGUMENTS)

            assert reply.case == "reused", given.__name__
            assert reply.stored.task_id in (FIRST, SECOND)
            assert harness.raw == before

    def test_when_the_reservation_has_expired(self, harness: RecordHarness) -> None:
        # A released record with finished steps is kept.
        token = harness.started().token
        harness.save_step(token)
        harness.release(token)

        assert harness.begin(key=OTHER_ARGUMENTS).case == "reused"

    def test_not_if_one_side_has_no_fingerprint(self, harness: RecordHarness) -> None:
        harness.expired()

        assert harness.begin(key=NO_ARGUMENTS).case == "begun"
        assert harness.record().fingerprint == harness.key.fingerprint

    def test_a_record_without_a_fingerprint_gets_one(self, harness: RecordHarness) -> None:
        harness.started(key=NO_ARGUMENTS)
        harness.abandon()

        harness.begin()

        assert harness.record().fingerprint == harness.key.fingerprint
