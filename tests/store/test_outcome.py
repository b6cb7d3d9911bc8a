"""complete and fail: the first outcome wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from tests.store.record_harness import (
    ERROR,
    ERROR_MS,
    FIRST,
    RESULT,
    RETENTION_MS,
    SECOND,
    WORKER,
    RecordHarness,
    RecordReply,
)

pytestmark = pytest.mark.core

Settle = Callable[[RecordHarness, int], RecordReply]

ways = pytest.mark.parametrize(
    ("settle", "state", "outcome", "kept_ms"),
    [
        (RecordHarness.complete, State.COMPLETED, RESULT, RETENTION_MS),
        (RecordHarness.fail, State.FAILED, ERROR, ERROR_MS),
    ],
    ids=["complete", "fail"],
)


@ways
class TestBoth:
    def test_store_the_outcome(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.started()

        reply = settle(harness, running.token)

        record = harness.record()
        assert reply.case == "ok"
        assert record.state is state
        assert (record.format, record.body) == outcome
        assert (record.token, record.attempt) == (running.token, 1)
        assert (record.task_id, record.worker) == (FIRST, WORKER)
        assert record.at_ms == reply.now_ms
        assert not record.sending

    def test_keep_it_for_the_retention(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        settle(harness, harness.started().token)

        assert kept_ms - 5000 < harness.left_ms() <= kept_ms

    def test_reply_the_same_when_sent_again(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.started()
        settle(harness, running.token)
        before = harness.raw

        assert settle(harness, running.token).case == "ok"
        assert harness.raw == before

    def test_are_accepted_after_the_lease_without_a_takeover(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.expired()

        assert settle(harness, running.token).case == "ok"

    def test_are_refused_while_a_takeover_runs(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        stale = harness.expired()
        successor = harness.started(task_id=SECOND)

        reply = settle(harness, stale.token)

        assert (reply.case, reply.record) == ("lost", successor)
        assert harness.record() == successor

    @pytest.mark.parametrize(
        "successors", [RecordHarness.complete, RecordHarness.fail], ids=["completed", "failed"]
    )
    def test_are_refused_with_the_outcome_of_a_takeover(
        self,
        harness: RecordHarness,
        settle: Settle,
        state: State,
        outcome: Payload,
        kept_ms: int,
        successors: Callable[[RecordHarness, int, Payload], RecordReply],
    ) -> None:
        stale = harness.expired()
        successors(
            harness, harness.started(task_id=SECOND).token, Payload("json", b"the successor's")
        )

        reply = settle(harness, stale.token)

        assert reply.case == "lost"
        assert reply.stored.state.finished
        assert reply.stored.body == b"the successor's"
        assert harness.record() == reply.record

    def test_are_refused_when_the_key_is_absent(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.started()
        harness.forget()

        assert settle(harness, running.token)[:2] == ("lost", None)
        assert harness.raw is None

    def test_are_refused_after_a_release(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        held = harness.held_for_retry()

        reply = settle(harness, held.token)

        assert (reply.case, reply.record) == ("lost", held)

    def test_are_refused_for_a_neighbouring_token(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.started()

        for other in (running.token - 1, running.token + 1, 0):
            assert settle(harness, other).case == "lost"
        assert harness.record() == running

    def test_delete_the_steps(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        running = harness.started()
        harness.save_step(running.token)

        settle(harness, running.token)

        assert harness.record().body == outcome.body

    def test_hold_any_bytes(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        body = bytes(range(256)) * 4096

        settle_with = RecordHarness.complete if state is State.COMPLETED else RecordHarness.fail
        settle_with(harness, harness.started().token, Payload("json+gzip", body))

        assert (harness.record().format, harness.record().body) == ("json+gzip", body)

    def test_can_have_no_value(
        self, harness: RecordHarness, settle: Settle, state: State, outcome: Payload, kept_ms: int
    ) -> None:
        settle_with = RecordHarness.complete if state is State.COMPLETED else RecordHarness.fail
        settle_with(harness, harness.started().token, Payload("", b"why not"))

        assert (harness.record().format, harness.record().body) == ("", b"why not")


def test_complete_and_fail_are_not_resends_of_each_other(harness: RecordHarness) -> None:
    token = harness.completed().token

    assert harness.fail(token).case == "lost"
    assert harness.record().state is State.COMPLETED
