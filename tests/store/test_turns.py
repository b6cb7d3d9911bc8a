"""Messages of one key: where it may run again, one at a time holds it, and one more may wait.

labs/verification searches the protocol; here are the promises in examples.
"""

from __future__ import annotations

import pytest

from celery_idempotent.core.record import Payload
from celery_idempotent.core.store import commands, run_sync
from tests.store.record_harness import (
    FIRST,
    LEASE_MS,
    RETENTION_MS,
    SECOND,
    RecordHarness,
    Turn,
)

pytestmark = pytest.mark.core


@pytest.fixture
def turn(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="finished"``."""
    return Turn(harness)


@pytest.fixture
def collapsing(harness: RecordHarness) -> Turn:
    """Messages with ``idempotency_until="started"``."""
    return Turn(harness, waits=True)


def test_the_next_message_runs_after_the_end_and_copies_replay(turn: Turn) -> None:
    tokens = []
    for message in (turn.first, turn.second, turn.third):
        tokens.append(message.started().token)
        for other in (turn.first, turn.second, turn.third):
            if other.raw is None:
                assert other.begin().stored.task_id == message.task_id
        payload = Payload("json", message.task_id.encode())
        assert message.complete(tokens[-1], payload).case == "ok"
        assert turn.shown.token == tokens[-1], "the key shows the last outcome"
        assert RETENTION_MS - 5000 < message.left_ms() <= RETENTION_MS

    assert tokens == sorted(set(tokens))
    for message in (turn.first, turn.second, turn.third):
        copy = message.begin()
        assert (copy.case, copy.stored.body) == ("finished", message.task_id.encode())


class TestPublish:
    def test_while_a_call_runs_lets_one_more_wait(self, collapsing: Turn) -> None:
        running = collapsing.first.started()

        assert collapsing.second.publish().case == "reserved"

        assert collapsing.third.publish().stored.task_id == SECOND
        assert collapsing.second.begin().case == "wait"
        assert collapsing.third.begin().case == "held"
        assert collapsing.shown.task_id == FIRST
        collapsing.first.complete(running.token)
        assert collapsing.shown.task_id == SECOND
        assert collapsing.second.begin().case == "begun"
        assert collapsing.third.publish().case == "reserved"

    def test_sees_a_message_that_has_begun_without_its_slot(self, collapsing: Turn) -> None:
        """A worker of another version, or with other options, does not know the slot."""
        collapsing.first.publish()
        command = commands.begin(
            collapsing.first.key.turn,
            execution_id=b"8 bytes.",
            task_id=FIRST,
            worker="w/1",
            lease_ms=LEASE_MS,
            retention_ms=RETENTION_MS,
        )._replace(key=collapsing.first.key)
        assert run_sync(collapsing.harness.store.execute(command)).case == "begun"

        assert collapsing.second.publish().case == "reserved"
