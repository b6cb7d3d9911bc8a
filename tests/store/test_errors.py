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
    LEASE_MS,
    OTHER_ARGUMENTS,
    OWNER,
    RETENTION_MS,
    SECOND,
    THIRD,
    RecordHarness,
)

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
