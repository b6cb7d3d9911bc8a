"""The outcome of an execution that another call has met is kept until that call may come back."""

from __future__ import annotations

import time

from celery_idempotent.key.key import default_root
from celery_idempotent.record import layout
from celery_idempotent.record.record import State
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    OWNER,
    RETENTION_MS,
    SECOND,
    RecordHarness,
)

#: Longer than each retention.
KEEP_MS = 2 * RETENTION_MS


def meet(harness: RecordHarness, min_retention_ms: int = KEEP_MS) -> None:
    assert harness.begin(task_id=SECOND, min_retention_ms=min_retention_ms).case == "held"


def kept(harness: RecordHarness, min_retention_ms: int = KEEP_MS) -> bool:
    return min_retention_ms - 5000 < harness.left_ms() <= min_retention_ms


def test_a_result_is_kept_for_it(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness)
    harness.complete(running.token)

    assert kept(harness)
    assert harness.begin(task_id=SECOND).case == "finished"


def test_an_error_is_kept_for_it(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness)
    harness.fail(running.token)

    assert kept(harness)


def test_an_error_that_ends_the_message_is_kept_for_its_copies(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness)
    harness.end_with_error(running.token)

    name = harness.store.name(harness.key.entry(default_root(FIRST)))
    assert KEEP_MS - 5000 < harness.client.pttl(name) <= KEEP_MS


def test_a_longer_retention_stays(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness, RETENTION_MS // 2)
    harness.complete(running.token)

    assert kept(harness, RETENTION_MS)


def test_a_completion_that_is_resent_keeps_it(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness)
    harness.complete(running.token)

    assert harness.complete(running.token).case == "ok"
    assert kept(harness)


def test_an_unmet_execution_keeps_the_retention(harness: RecordHarness) -> None:
    harness.complete(harness.started(min_retention_ms=KEEP_MS).token)

    assert kept(harness, RETENTION_MS)


def test_a_call_that_does_not_come_back_changes_nothing(harness: RecordHarness) -> None:
    harness.started()
    before = harness.raw
    meet(harness, 0)

    assert harness.raw == before


def test_a_call_that_comes_back_at_once_counts(harness: RecordHarness) -> None:
    harness.started()
    before = harness.raw
    meet(harness, 1)

    assert harness.raw != before


def test_a_reservation_is_not_an_execution(harness: RecordHarness) -> None:
    harness.reserved()
    before = harness.raw
    meet(harness)

    assert harness.raw == before


def test_the_record_is_written_once_in_half_of_the_time(harness: RecordHarness) -> None:
    harness.started()
    meet(harness)
    once = harness.raw
    for _ in range(3):
        meet(harness)

    assert harness.raw == once
    meet(harness, KEEP_MS * 9 // 5)
    assert harness.raw == once
    meet(harness, KEEP_MS * 5 // 2)
    assert harness.raw != once
    assert len(harness.raw or b"") == len(once or b"")  # one time, not two


def test_neither_lease_nor_steps_nor_expiry_change(harness: RecordHarness) -> None:
    running = harness.started()
    harness.save_step(running.token)
    before, left_ms = harness.record(), harness.left_ms()
    meet(harness)
    after = harness.record()

    assert (after.token, after.at_ms, after.task_id) == (before.token, before.at_ms, FIRST)
    assert after.body == before.body
    assert left_ms - 5000 < harness.left_ms() <= left_ms
    assert harness.extend(running.token).case == "ok"


def test_the_begin_that_is_resent_is_granted_again(harness: RecordHarness) -> None:
    harness.started(execution_id=OWNER)
    meet(harness)

    resent = harness.begin(execution_id=OWNER)

    assert resent.case == "begun"
    harness.complete(resent.token)
    assert kept(harness)


def test_a_begin_without_a_reply_is_continued(harness: RecordHarness) -> None:
    harness.started(execution_id=OWNER)
    meet(harness)

    again = harness.begin(unanswered_ids=OWNER)

    assert (again.case, again.stored.attempt) == ("begun", 1)
    harness.complete(again.token)
    assert kept(harness)


def test_it_lasts_through_a_takeover(harness: RecordHarness) -> None:
    harness.started()
    meet(harness)
    harness.abandon(reason="process_lost", grace_ms=60_000)
    meet(harness, 3 * KEEP_MS)
    assert harness.record().ended_by == "process_lost"
    harness.abandon()
    time.sleep(0.002)
    raw = harness.begin(task_id=SECOND)

    assert (raw.case, raw.stored.attempt) == ("begun", 2)
    assert 0 < layout.begun(harness.raw or b"").orphaned_seconds < 60
    harness.complete(raw.token)
    assert kept(harness, 3 * KEEP_MS)


def test_it_lasts_through_a_retry(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness)
    harness.release(running.token, hold_ms=60_000, generation=1)
    retry = harness.begin(generation=1)

    assert retry.case == "begun"
    assert layout.begun(harness.raw or b"").orphaned_seconds == 0
    harness.complete(retry.token)
    assert kept(harness)


def test_it_ends_with_a_release(harness: RecordHarness) -> None:
    running = harness.started()
    meet(harness)
    harness.release(running.token)
    harness.complete(harness.started().token)

    assert kept(harness, RETENTION_MS)


def test_the_error_of_a_poisoned_task_is_kept_for_it(harness: RecordHarness) -> None:
    harness.started()
    meet(harness)
    harness.abandon()

    assert harness.begin(max_attempts=1).case == "finished"
    assert harness.record().state is State.FAILED
    assert kept(harness)
    assert ERROR_MS < KEEP_MS


def test_a_hard_limit_keeps_its_error_for_copies(harness: RecordHarness) -> None:
    harness.started()
    meet(harness)
    harness.abandon(error=ERROR)

    assert kept(harness)
