"""release: the key is absent again, or reserved for a retry."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.key.key import default_root
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    HOLD_MS,
    OTHER_ARGUMENTS,
    RETENTION_MS,
    SECOND,
    RecordHarness,
    RecordReply,
)

pytestmark = pytest.mark.core


class TestReleased:
    def test_the_key_is_absent(self, harness: RecordHarness) -> None:
        running = harness.started()

        assert harness.release(running.token).case == "ok"
        assert harness.raw is None

    def test_the_same_reply_is_returned_again(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.release(running.token)

        assert harness.release(running.token).case == "ok"

    def test_an_absent_key_is_released(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.forget()

        assert harness.release(running.token).case == "ok"

    def test_attempts_start_again(self, harness: RecordHarness) -> None:
        harness.expired()
        second = harness.started()

        harness.release(second.token)

        assert harness.begin().stored.attempt == 1


class TestHeld:
    def test_the_key_is_reserved_for_the_same_task_id(self, harness: RecordHarness) -> None:
        running = harness.started()

        reply = harness.release(running.token, HOLD_MS)

        record = harness.record()
        assert reply.case == "ok"
        assert record.state is State.RESERVED
        assert record.task_id == FIRST
        assert record.at_ms == reply.now_ms + HOLD_MS
        assert (record.token, record.attempt) == (running.token, 0)
        assert HOLD_MS - 5000 < harness.left_ms() <= HOLD_MS

    def test_the_same_reply_is_returned_again(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.release(running.token, HOLD_MS)
        before = harness.raw

        assert harness.release(running.token, HOLD_MS).case == "ok"
        assert harness.raw == before

    def test_the_retry_begins_and_a_duplicate_does_not(self, harness: RecordHarness) -> None:
        harness.release(harness.started().token, HOLD_MS)

        assert harness.begin(task_id=SECOND).case == "held"
        assert harness.begin().case == "begun"


@pytest.mark.parametrize("hold_ms", [0, HOLD_MS], ids=["free", "hold"])
class TestLost:
    @pytest.mark.parametrize(
        "other",
        [
            lambda harness, token: None,
            lambda harness, token: harness.complete(token),
            lambda harness, token: harness.release(token, HOLD_MS),
        ],
        ids=["runs", "has completed", "waits for its retry"],
    )
    def test_to_another_execution(
        self,
        harness: RecordHarness,
        hold_ms: int,
        other: Callable[[RecordHarness, int], RecordReply | None],
    ) -> None:
        stale = harness.expired()
        other(harness, harness.started(task_id=SECOND).token)
        before = harness.record()

        reply = harness.release(stale.token, hold_ms)

        assert (reply.case, reply.record) == ("lost", before)
        assert reply.stored.task_id == SECOND
        assert harness.record() == before


class TestReplacementThatFailed:
    """The outcome of a task that replaced itself, released with the error of its replacement."""

    def test_frees_the_key_and_keeps_the_error(self, harness: RecordHarness) -> None:
        replaced = self._replaced(harness)

        reply = self._release(harness, replaced.token)

        copy = harness.begin(generation=4)
        assert (reply.case, copy.case) == ("ok", "sent")
        assert (copy.stored.state, copy.stored.body) == (State.FAILED, ERROR.body)
        begun = harness.begin(key=OTHER_ARGUMENTS, task_id=SECOND)
        assert begun.case == "begun"
        assert begun.token > replaced.token
        assert harness.begin(generation=4).case == "sent"

    def test_the_same_reply_is_returned_again(self, harness: RecordHarness) -> None:
        replaced = self._replaced(harness)
        self._release(harness, replaced.token)
        before = harness.raw

        assert self._release(harness, replaced.token).case == "ok"
        assert harness.raw == before

    def test_not_under_another_token(self, harness: RecordHarness) -> None:
        replaced = self._replaced(harness)

        assert self._release(harness, replaced.token - 1).case == "lost"
        assert harness.record() == replaced

    def test_not_without_an_error(self, harness: RecordHarness) -> None:
        replaced = self._replaced(harness)

        assert harness.release(replaced.token).case == "lost"
        assert harness.record() == replaced

    def _replaced(self, harness: RecordHarness) -> Record:
        body = layout.write_replacement(5, FIRST, b"")
        harness.complete(harness.started().token, Payload("=task", body), sending_ms=0)
        return harness.record()

    def _release(self, harness: RecordHarness, token: int) -> Reply:
        return run_sync(
            harness.store.execute(
                commands.release(
                    harness.key,
                    token,
                    hold_ms=0,
                    retention_ms=RETENTION_MS,
                    root=default_root(FIRST),
                    generation=4,
                    error=ERROR,
                    error_ms=ERROR_MS,
                )
            )
        )


class TestWithSteps:
    def test_they_are_kept_after_the_release(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)

        harness.release(running.token)

        assert harness.steps == {"reserve": ("json", b'"r-1"')}
        assert RETENTION_MS - 5000 < harness.left_ms() <= RETENTION_MS

    def test_any_task_id_can_begin(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)
        harness.release(running.token)

        reply = harness.begin(task_id=SECOND)

        assert (reply.case, reply.stored.attempt) == ("begun", 1)
        assert "reserve" in harness.steps

    def test_a_reservation_keeps_them_past_its_end(self, harness: RecordHarness) -> None:
        running = harness.started()
        harness.save_step(running.token)

        harness.release(running.token, HOLD_MS)

        assert "reserve" in harness.steps
        assert harness.left_ms() > RETENTION_MS
        assert harness.begin(task_id=SECOND).case == "held"
