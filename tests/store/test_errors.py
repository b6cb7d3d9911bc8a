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
    OWNER,
    RETENTION_MS,
    SECOND,
    THIRD,
    RecordHarness,
)
from tests.waiting import eventually

pytestmark = pytest.mark.core

#: Another execution id.
THIS = b"another!"
LATE = Payload("json", b'{"exc_type": "TimeoutError"}')


def by_release(harness: RecordHarness) -> None:
    harness.end_with_error(harness.started().token)


def by_a_death(harness: RecordHarness) -> None:
    harness.started()
    harness.abandon(error=ERROR)


either = pytest.mark.parametrize("ended", [by_release, by_a_death], ids=lambda how: how.__name__)


@either
def test_copies_of_the_message_get_it_whatever_other_messages_do(
    harness: RecordHarness, ended: Any
) -> None:
    ended(harness)
    before, name = harness.raw, harness.store.name(harness.key.entry(default_root(FIRST)))

    reply = harness.begin()

    assert (reply.case, reply.stored.state, reply.stored.task_id) == ("sent", State.FAILED, FIRST)
    assert (reply.stored.format, reply.stored.body) == ERROR
    assert harness.raw == before
    assert ERROR_MS - 5000 < harness.client.pttl(name) <= ERROR_MS
    assert scan.key_of_name(name, harness.store.config.prefix) is None, "no record of its own"
    assert run_sync(harness.store.get(harness.key)) is None
    successor = harness.started(task_id=SECOND)
    assert harness.begin().stored.body == ERROR.body
    harness.end_with_error(successor.token, LATE, task_id=SECOND)
    assert harness.begin(task_id=SECOND).stored.body == LATE.body
    assert harness.begin(root=b"another!").case == "begun", "a second publish of the task id"
    harness.complete(harness.record().token)
    assert harness.begin().stored.body == ERROR.body
    assert harness.begin(task_id=THIRD).stored.state is State.COMPLETED


@either
def test_a_message_with_other_arguments_runs(harness: RecordHarness, ended: Any) -> None:
    ended(harness)
    running = harness.started(task_id=SECOND, key=OTHER_ARGUMENTS)
    assert harness.begin().case == "sent"

    harness.release(running.token)

    assert run_sync(harness.store.get(harness.key)) is None
    assert harness.begin().case == "sent"


@either
def test_another_message_may_reserve(harness: RecordHarness, ended: Any) -> None:
    ended(harness)

    assert harness.reserve(SECOND).case == "reserved"
    assert harness.begin(task_id=THIRD).case == "held"
    assert harness.begin(task_id=SECOND).case == "begun"


def test_a_copy_sends_the_errbacks_if_the_sender_has_died(harness: RecordHarness) -> None:
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


def test_an_earlier_generation_gets_it_and_a_later_one_runs(harness: RecordHarness) -> None:
    harness.end_with_error(harness.started(generation=2).token, generation=2)

    assert harness.begin(generation=1).case == "sent"
    assert harness.begin(generation=2).case == "sent"
    assert harness.begin(generation=3).case == "begun"


def test_it_is_left_once_and_not_without_the_lease(harness: RecordHarness) -> None:
    frozen = harness.expired()
    running = harness.started(task_id=SECOND)
    assert harness.end_with_error(frozen.token).case == "lost"
    assert harness.entry() is None

    for _ in range(2):
        assert harness.end_with_error(running.token, task_id=SECOND).case == "ok"
    for refused in (harness.complete, harness.fail, harness.extend, harness.save_step):
        assert refused(running.token).case == "lost"


def test_finished_steps_stay_for_the_next_execution(harness: RecordHarness) -> None:
    running = harness.started()
    harness.save_step(running.token)
    harness.end_with_error(running.token)

    assert harness.state is State.RESERVED
    assert RETENTION_MS - 5000 < harness.left_ms() <= RETENTION_MS
    assert harness.begin().case == "sent"
    assert harness.begin(task_id=SECOND, key=OTHER_ARGUMENTS).case == "reused"
    successor = harness.started(task_id=SECOND)
    harness.save_step(successor.token, "ship", b"2")
    assert harness.steps == {"reserve": ("json", b'"r-1"'), "ship": ("json", b"2")}


def test_a_damaged_entry_is_corrupt(harness: RecordHarness) -> None:
    name = harness.store.name(harness.key.entry(default_root(FIRST)))
    harness.client.set(name, "damaged", px=RETENTION_MS)

    with pytest.raises(CorruptRecordError):
        harness.begin()


class TestDeath:
    def test_is_counted_past_a_reservation(self, harness: RecordHarness) -> None:
        by_a_death(harness)
        harness.reserve(SECOND)
        assert harness.started(task_id=SECOND, max_attempts=2).attempt == 2
        harness.abandon(SECOND, error=ERROR)

        reply = harness.begin(task_id=THIRD, max_attempts=2)

        assert (reply.case, reply.stored.body) == ("finished", b"poisoned")

    def test_holds_the_key_during_the_grace_period(self, harness: RecordHarness) -> None:
        child = harness.started()

        for _ in range(2):
            assert harness.abandon(grace_ms=LEASE_MS, error=ERROR).case == "ok"

        assert harness.begin().case == "sent"
        assert harness.begin(task_id=SECOND).case == "held"
        assert harness.begin(generation=1).case == "held"
        assert harness.reserve(SECOND).case == harness.reserve().case == "held"
        assert harness.complete(child.token).case == "lost"


def test_a_retry_keeps_its_reservation_unless_it_never_comes(harness: RecordHarness) -> None:
    harness.release(harness.started().token, HOLD_MS, generation=1)
    assert harness.begin(generation=0).case == "held"
    running = harness.started(generation=1)
    harness.save_step(running.token)

    harness.release(running.token, 1, generation=2)

    eventually(lambda: harness.now_ms() >= harness.record().at_ms)
    assert harness.begin(generation=0).case == "begun"
