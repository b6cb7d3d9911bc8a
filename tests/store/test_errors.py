"""An error of one task id, not of the key: copies of its message get it, others run."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from celery_idempotent.store.run_sync import run_sync
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
    RecordHarness,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core

THIRD = "33333333-3333-4333-8333-333333333333"
LATE = Payload("json", b'{"exc_type": "TimeoutError"}')


def by_release(harness: RecordHarness) -> None:
    harness.end_with_error(harness.started().token)


def by_a_death(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon(error=ERROR)


either = pytest.mark.parametrize("ended", [by_release, by_a_death], ids=lambda how: how.__name__)


class TestCopyOfTheMessage:
    @either
    def test_gets_the_error(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)
        before = harness.raw

        reply = harness.begin()

        assert reply.case == "finished"
        assert (reply.stored.state, reply.stored.task_id) == (State.FAILED, FIRST)
        assert (reply.stored.format, reply.stored.body) == (ERROR.format, ERROR.body)
        assert not reply.stored.continuation_sent
        assert harness.raw == before

    @either
    def test_gets_it_while_another_task_id_runs_and_after_that_one_failed(
        self, harness: RecordHarness, ended: Any
    ) -> None:
        ended(harness)
        successor = harness.started(task_id=SECOND)
        assert harness.begin().stored.body == ERROR.body

        harness.end_with_error(successor.token, LATE)

        assert harness.begin().stored.body == ERROR.body
        assert harness.begin(task_id=SECOND).stored.body == LATE.body
        assert harness.begin(task_id=THIRD).case == "begun"

    @either
    def test_gets_it_after_a_call_with_other_arguments(
        self, harness: RecordHarness, ended: Any
    ) -> None:
        ended(harness)
        harness.started(task_id=SECOND, key=OTHER_ARGUMENTS)

        assert harness.begin().case == "finished"

    def test_gets_the_outcome_once_there_is_one(self, harness: RecordHarness) -> None:
        by_release(harness)
        harness.complete(harness.started(task_id=SECOND).token)

        reply = harness.begin()

        assert (reply.case, reply.stored.state) == ("finished", State.COMPLETED)

    def test_learns_that_the_continuation_was_sent(self, harness: RecordHarness) -> None:
        by_release(harness)

        assert harness.mark_continued(SECOND).case == "lost"
        assert harness.mark_continued().case == "ok"
        assert harness.mark_continued().case == "ok"
        harness.started(task_id=SECOND)

        assert harness.begin().stored.continuation_sent

    def test_learns_it_though_another_execution_has_begun(self, harness: RecordHarness) -> None:
        by_release(harness)
        running = harness.started(task_id=SECOND)

        assert harness.mark_continued().case == "ok"
        assert harness.begin().stored.continuation_sent
        assert harness.record().token == running.token

    def test_of_an_earlier_message_gets_it_and_a_later_message_runs(
        self, harness: RecordHarness
    ) -> None:
        harness.end_with_error(harness.started(generation=2).token, generation=2)

        assert harness.begin(generation=1).case == "finished"
        assert harness.begin(generation=2).case == "finished"
        assert harness.begin(generation=3).case == "begun"


class TestOtherTaskIds:
    @either
    def test_begin(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)
        last = harness.record().token

        reply = harness.begin(task_id=SECOND)

        assert reply.case == "begun"
        assert reply.token > last

    @either
    def test_may_have_other_arguments(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)

        assert harness.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "begun"

    @either
    def test_reserve(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)

        assert harness.reserve(SECOND).case == "reserved"
        assert harness.begin(task_id=THIRD).case == "held"
        assert harness.begin(task_id=SECOND).case == "begun"

    @either
    def test_see_no_record(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)

        assert run_sync(harness.store.get(harness.key)) is None

    def test_that_are_released_without_an_error_keep_it(self, harness: RecordHarness) -> None:
        by_release(harness)
        running = harness.started(task_id=SECOND)

        harness.release(running.token)

        assert run_sync(harness.store.get(harness.key)) is None
        assert harness.begin().case == "finished"
        assert harness.begin(task_id=SECOND).case == "begun"

    def test_whose_reservation_expired_leave_no_fingerprint(self, harness: RecordHarness) -> None:
        by_release(harness)
        harness.reserve(SECOND, hold_ms=1)
        eventually(lambda: harness.now_ms() >= harness.record().at_ms)

        assert harness.begin(task_id=THIRD, key=OTHER_ARGUMENTS).case == "begun"


class TestExplicitPublish:
    """A publish of the same task id, under a reservation."""

    def test_runs(self, harness: RecordHarness) -> None:
        by_release(harness)

        assert harness.reserve().case == "reserved"
        running = harness.begin()
        assert running.case == "begun"
        assert harness.begin().case == "held"
        assert harness.complete(running.token).case == "ok"

    def test_that_is_released_keeps_the_error(self, harness: RecordHarness) -> None:
        by_release(harness)
        harness.reserve()

        harness.reserve(hold_ms=0)

        assert run_sync(harness.store.get(harness.key)) is None
        assert harness.begin().case == "finished"


class TestRecordOfErrors:
    def test_belongs_to_no_task_id(self, harness: RecordHarness) -> None:
        running = harness.started()

        assert harness.end_with_error(running.token).case == "ok"

        before = harness.raw
        assert harness.end_with_error(running.token).case == "ok"  # sent again
        for refused in (harness.complete, harness.fail, harness.extend, harness.save_step):
            assert refused(running.token).case == "lost"
        assert harness.raw == before

    def test_expires_with_the_retention_of_errors(self, harness: RecordHarness) -> None:
        by_release(harness)

        assert ERROR_MS - 5000 < harness.left_ms() <= ERROR_MS

    def test_expires_with_the_retention_of_steps(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)

        harness.end_with_error(running.token)

        assert RETENTION_MS - 5000 < harness.left_ms() <= RETENTION_MS

    def test_expires_with_the_retention_of_errors_if_that_of_steps_is_shorter(
        self, harness: RecordHarness
    ) -> None:
        running = harness.started()
        harness.save_step(running.token)

        harness.end_with_error(running.token, error_ms=2 * RETENTION_MS)

        assert 2 * RETENTION_MS - 5000 < harness.left_ms() <= 2 * RETENTION_MS

    def test_keeps_finished_steps_for_the_next_execution(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)
        harness.end_with_error(running.token)

        assert harness.state is State.RESERVED
        assert harness.steps == {"reserve": ("json", b'"r-1"')}
        assert harness.begin().case == "finished"
        assert harness.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "reused"
        successor = harness.started(task_id=SECOND)
        harness.save_step(successor.token, "ship", b"2")
        assert harness.steps == {"reserve": ("json", b'"r-1"'), "ship": ("json", b"2")}

    def test_drops_the_oldest_error_beyond_its_limit(self, harness: RecordHarness) -> None:
        large = Payload("json", b"x" * 7_000)
        ids = [FIRST, SECOND, THIRD, "4"]
        for task_id in ids:
            harness.end_with_error(harness.started(task_id=task_id).token, large)

        kept = steps.errors(harness.record().body, "key")

        assert kept == [tuple(large)] * 3
        assert [harness.begin(task_id=task_id).case for task_id in ids[1:]] == ["finished"] * 3
        assert harness.begin(task_id=FIRST).case == "begun"


class TestAbandonedWithAnError:
    def test_is_counted(self, harness: RecordHarness) -> None:
        for attempt, task_id in enumerate([FIRST, SECOND], 1):
            assert harness.started(task_id=task_id, max_attempts=2).attempt == attempt
            harness.abandon(task_id, error=ERROR)

        reply = harness.begin(task_id=THIRD, max_attempts=2)

        assert reply.case == "finished"
        assert (reply.stored.state, reply.stored.body) == (State.FAILED, b"poisoned")

    def test_is_counted_past_a_reservation(self, harness: RecordHarness) -> None:
        by_a_death(harness)
        harness.reserve(SECOND)

        assert harness.started(task_id=SECOND).attempt == 2

    def test_holds_the_key_during_the_grace_period(self, harness: RecordHarness) -> None:
        child = harness.started()

        harness.abandon(grace_ms=LEASE_MS, error=ERROR)

        assert harness.begin().case == "finished"
        assert harness.begin(task_id=SECOND).case == "held"
        assert harness.begin(generation=1).case == "held"
        assert harness.reserve(SECOND).case == harness.reserve().case == "held"
        assert harness.complete(child.token).case == "lost"

    def test_that_is_sent_again_changes_nothing(self, harness: RecordHarness) -> None:
        harness.started()
        harness.abandon(error=ERROR)
        before = harness.raw

        assert harness.abandon(error=ERROR).case == "ok"
        assert harness.raw == before
        assert harness.abandon(worker=OTHER_WORKER, error=ERROR).case == "lost"
        assert harness.record().worker == WORKER


class TestRetry:
    def test_keeps_its_reservation_when_a_copy_of_the_earlier_message_comes(
        self, harness: RecordHarness
    ) -> None:
        harness.release(harness.started().token, HOLD_MS, generation=1)

        assert harness.begin(generation=0).case == "held"
        assert harness.begin(generation=1).case == "begun"

    def test_that_never_comes_lets_the_copy_begin(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)
        harness.release(running.token, 1, generation=1)
        eventually(lambda: harness.now_ms() >= harness.record().at_ms)

        assert harness.begin(generation=0).case == "begun"
