"""complete and fail: the first outcome wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


class Way(NamedTuple):
    """How an execution ends."""

    settle: Callable[..., RecordReply]
    state: State
    outcome: Payload
    kept_ms: int


@pytest.fixture(params=["complete", "fail"])
def way(request: pytest.FixtureRequest) -> Way:
    return {
        "complete": Way(RecordHarness.complete, State.COMPLETED, RESULT, RETENTION_MS),
        "fail": Way(RecordHarness.fail, State.FAILED, ERROR, ERROR_MS),
    }[request.param]


class TestBoth:
    def test_store_the_outcome(self, harness: RecordHarness, way: Way) -> None:
        running = harness.started()

        reply = way.settle(harness, running.token)

        record = harness.record()
        assert reply.case == "ok"
        assert record.state is way.state
        assert (record.format, record.body) == way.outcome
        assert (record.token, record.attempt) == (running.token, 1)
        assert (record.task_id, record.worker) == (FIRST, WORKER)
        assert record.at_ms == reply.now_ms
        assert not record.sending

    def test_keep_it_for_the_retention(self, harness: RecordHarness, way: Way) -> None:
        way.settle(harness, harness.started().token)

        assert way.kept_ms - 5000 < harness.left_ms() <= way.kept_ms

    def test_reply_the_same_when_sent_again(self, harness: RecordHarness, way: Way) -> None:
        running = harness.started()
        way.settle(harness, running.token)
        before = harness.raw

        assert way.settle(harness, running.token).case == "ok"
        assert harness.raw == before

    def test_are_accepted_after_the_lease_without_a_takeover(
        self, harness: RecordHarness, way: Way
    ) -> None:
        running = harness.expired()

        assert way.settle(harness, running.token).case == "ok"

    def test_are_refused_while_a_takeover_runs(self, harness: RecordHarness, way: Way) -> None:
        stale = harness.expired()
        successor = harness.started(task_id=SECOND)

        reply = way.settle(harness, stale.token)

        assert (reply.case, reply.record) == ("lost", successor)
        assert harness.record() == successor

    @pytest.mark.parametrize(
        "successors", [RecordHarness.complete, RecordHarness.fail], ids=["completed", "failed"]
    )
    def test_are_refused_with_the_outcome_of_a_takeover(
        self,
        harness: RecordHarness,
        way: Way,
        successors: Callable[[RecordHarness, int, Payload], RecordReply],
    ) -> None:
        stale = harness.expired()
        successors(
            harness, harness.started(task_id=SECOND).token, Payload("json", b"the successor's")
        )

        reply = way.settle(harness, stale.token)

        assert reply.case == "lost"
        assert reply.stored.state.finished
        assert reply.stored.body == b"the successor's"
        assert harness.record() == reply.record

    def test_are_refused_when_the_key_is_absent(self, harness: RecordHarness, way: Way) -> None:
        running = harness.started()
        harness.forget()

        assert way.settle(harness, running.token)[:2] == ("lost", None)
        assert harness.raw is None

    def test_are_refused_after_a_release(self, harness: RecordHarness, way: Way) -> None:
        held = harness.held_for_retry()

        reply = way.settle(harness, held.token)

        assert (reply.case, reply.record) == ("lost", held)

    def test_are_refused_for_a_neighbouring_token(self, harness: RecordHarness, way: Way) -> None:
        running = harness.started()

        for other in (running.token - 1, running.token + 1, 0):
            assert way.settle(harness, other).case == "lost"
        assert harness.record() == running

    def test_delete_the_steps(self, harness: RecordHarness, way: Way) -> None:
        running = harness.started()
        harness.save_step(running.token)

        way.settle(harness, running.token)

        assert harness.record().body == way.outcome.body

    @pytest.mark.parametrize(
        "payload",
        [Payload("json+gzip", bytes(range(256)) * 4096), Payload("", b"why not")],
        ids=["any bytes", "no value"],
    )
    def test_hold_any_payload(self, harness: RecordHarness, way: Way, payload: Payload) -> None:
        way.settle(harness, harness.started().token, payload)

        assert (harness.record().format, harness.record().body) == payload


def test_complete_and_fail_are_not_resends_of_each_other(harness: RecordHarness) -> None:
    token = harness.completed().token

    assert harness.fail(token).case == "lost"
    assert harness.record().state is State.COMPLETED
