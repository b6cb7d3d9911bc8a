"""The messages of a key that may run again: the record of each, and the turn that they share."""

from __future__ import annotations

from typing import Any

from celery_idempotent.record import steps
from celery_idempotent.record.record import Record, State
from tests.store.record_harness import FIRST, HOLD_MS, SECOND, RecordHarness, RecordReply

THIRD = "33333333-3333-4333-8333-333333333333"


class Message(RecordHarness):
    """The record of one message, and the transitions with its task id."""

    def __init__(self, turn: RecordHarness, task_id: str, *, waits: bool) -> None:
        super().__init__(turn.store, turn.client, turn.key.of_message(task_id))
        self.task_id = task_id
        self._waits = waits

    def begin(self, **how: Any) -> RecordReply:
        next_turn_ms = HOLD_MS if self._waits else 0
        return super().begin(**{"task_id": self.task_id, "next_turn_ms": next_turn_ms, **how})

    def publish(self, **how: Any) -> RecordReply:
        """Reserve the turn, as publishing with deduplication does."""
        return self.reserve(self.task_id, waits=self._waits, **how)

    def give_back(self) -> None:
        """End the reservation, as for a message that is discarded."""
        assert self.reserve(self.task_id, hold_ms=0).case == "reserved"

    def ran(self) -> Record:
        """Return the record after a whole run."""
        return self.completed()


class Turn:
    """The record of the turn, and three messages that want it."""

    def __init__(self, turn: RecordHarness, *, waits: bool = False) -> None:
        self.harness = turn
        self.first, self.second, self.third = (
            Message(turn, task_id, waits=waits) for task_id in (FIRST, SECOND, THIRD)
        )

    @property
    def state(self) -> State | None:
        return self.harness.state

    @property
    def holder(self) -> str | None:
        """The task id that has the turn."""
        return None if self.harness.raw is None else self.harness.record().task_id

    @property
    def waits(self) -> bool:
        """Whether a message waits for the next turn."""
        record = self.harness.record()
        return not record.state.finished and b"W" in record.body[6:7]

    def steps(self) -> list[Any]:
        """Return what readers of the record take for steps."""
        return [*steps.read(self.harness.record().body, "key")]
