"""An error of one message, not of the key: copies of that message get it, others run."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import default_root
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection import scan
from celery_idempotent.store.run_sync import run_sync
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    HOLD_MS,
    LEASE_MS,
    OTHER_ARGUMENTS,
    OTHER_WORKER,
    OWNER,
    RETENTION_MS,
    SECOND,
    WORKER,
    RecordHarness,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core

THIRD = "33333333-3333-4333-8333-333333333333"
#: Another execution id.
THIS = b"another!"
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

        assert reply.case == "sent"
        assert (reply.stored.state, reply.stored.task_id) == (State.FAILED, FIRST)
        assert (reply.stored.format, reply.stored.body) == (ERROR.format, ERROR.body)
        assert harness.raw == before

    @either
    def test_gets_it_while_another_task_id_runs_and_after_that_one_failed(
        self, harness: RecordHarness, ended: Any
    ) -> None:
        ended(harness)
        successor = harness.started(task_id=SECOND)
        assert harness.begin().stored.body == ERROR.body

        harness.end_with_error(successor.token, LATE, task_id=SECOND)

        assert harness.begin().stored.body == ERROR.body
        assert harness.begin(task_id=SECOND).stored.body == LATE.body
        assert harness.begin(task_id=THIRD).case == "begun"

    @either
    def test_gets_it_after_a_call_with_other_arguments(
        self, harness: RecordHarness, ended: Any
    ) -> None:
        ended(harness)
        harness.started(task_id=SECOND, key=OTHER_ARGUMENTS)

        assert harness.begin().case == "sent"

    def test_gets_it_after_another_message_has_the_outcome(self, harness: RecordHarness) -> None:
        by_release(harness)
        harness.complete(harness.started(task_id=SECOND).token)

        assert harness.begin().stored.body == ERROR.body
        assert harness.begin(task_id=THIRD).stored.state is State.COMPLETED

    def test_sends_the_errbacks_if_the_sender_has_died(self, harness: RecordHarness) -> None:
        running = harness.started(execution_id=OWNER, continues=True)
        harness.end_with_error(running.token, sending_ms=LEASE_MS)
        harness.started(task_id=SECOND)

        assert harness.begin(continues=True).case == "held"
        harness.abandon()
        assert harness.begin(execution_id=THIS, continues=True).case == "finished"
        assert harness.begin(continues=True).case == "held"
        assert harness.mark_continued().case == "lost"
        assert harness.mark_continued(THIS).case == harness.mark_continued(THIS).case == "ok"
        assert harness.begin(continues=True).case == "sent"

    def test_of_an_earlier_message_gets_it_and_a_later_message_runs(
        self, harness: RecordHarness
    ) -> None:
        harness.end_with_error(harness.started(generation=2).token, generation=2)

        assert harness.begin(generation=1).case == "sent"
        assert harness.begin(generation=2).case == "sent"
        assert harness.begin(generation=3).case == "begun"


class TestOtherMessages:
    @either
    def test_begin(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)

        assert harness.begin(task_id=SECOND).case == "begun"

    @either
    def test_begin_with_the_same_task_id(self, harness: RecordHarness, ended: Any) -> None:
        """A second publish."""
        ended(harness)

        assert harness.begin(root=b"another!").case == "begun"
        assert harness.begin().stored.body == ERROR.body

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
        assert harness.begin().case == "sent"
        assert harness.begin(task_id=SECOND).case == "begun"

    def test_whose_reservation_expired_leave_no_fingerprint(self, harness: RecordHarness) -> None:
        by_a_death(harness)
        harness.reserve(SECOND)
        harness.reserve(SECOND, hold_ms=0)

        assert harness.begin(task_id=THIRD, key=OTHER_ARGUMENTS).case == "begun"


class TestEntry:
    def test_is_left_once(self, harness: RecordHarness) -> None:
        running = harness.started()

        assert harness.end_with_error(running.token).case == "ok"

        before = harness.raw
        assert harness.end_with_error(running.token).case == "ok"  # sent again
        for refused in (harness.complete, harness.fail, harness.extend, harness.save_step):
            assert refused(running.token).case == "lost"
        assert harness.raw == before

    def test_is_not_left_without_the_lease(self, harness: RecordHarness) -> None:
        frozen = harness.expired()
        harness.started(task_id=SECOND)

        assert harness.end_with_error(frozen.token).case == "lost"
        assert harness.entry() is None

    @either
    def test_expires_with_the_retention_of_errors(self, harness: RecordHarness, ended: Any) -> None:
        ended(harness)

        left = harness.client.pttl(harness.store.name(harness.key.entry(default_root(FIRST))))
        assert ERROR_MS - 5000 < left <= ERROR_MS

    def test_leaves_finished_steps_for_the_next_execution(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)
        harness.end_with_error(running.token)

        assert harness.state is State.RESERVED
        assert RETENTION_MS - 5000 < harness.left_ms() <= RETENTION_MS
        assert harness.steps == {"reserve": ("json", b'"r-1"')}
        assert harness.begin().case == "sent"
        assert harness.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "reused"
        successor = harness.started(task_id=SECOND)
        harness.save_step(successor.token, "ship", b"2")
        assert harness.steps == {"reserve": ("json", b'"r-1"'), "ship": ("json", b"2")}

    def test_that_is_damaged_is_corrupt(self, harness: RecordHarness) -> None:
        name = harness.store.name(harness.key.entry(default_root(FIRST)))
        harness.client.set(name, "damaged", px=RETENTION_MS)

        with pytest.raises(CorruptRecordError):
            harness.begin()

    def test_is_no_record_of_its_own(self, harness: RecordHarness) -> None:
        name = harness.store.name(harness.key.entry(default_root(FIRST)))

        assert scan.key_of_name(name, harness.store.config.prefix) is None


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

        assert harness.begin().case == "sent"
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
