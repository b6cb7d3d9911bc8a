"""One task for each of the four wishes: what may be wanted of a key."""

from __future__ import annotations

import os
from typing import Any

from celery_idempotent import TASK_ID
from tests.worker.ledger import Ledger
from tests.worker.tasks import handle, task_of


def handle_in_turn(self: Any, order: str) -> dict[str, Any]:
    """Handles an order; notes when an execution starts and ends."""
    ledger = Ledger.of(self.app)
    ledger.note(order, f"start {os.getpid()}")
    try:
        return handle(self, order)
    finally:
        ledger.note(order, f"end {os.getpid()}")


once = task_of(handle_in_turn, "once")
in_turn = task_of(handle_in_turn, "in_turn", idempotency_until="finished")
unless_running = task_of(
    handle_in_turn,
    "unless_running",
    idempotency_until="finished",
    idempotency_on_conflict="ignore",
)
reserved_turn = task_of(
    handle_in_turn,
    "reserved_turn",
    idempotency_until="finished",
    idempotency_dedupe_publish=True,
)
collapsed = task_of(
    handle_in_turn,
    "collapsed_burst",
    idempotency_until="started",
    idempotency_dedupe_publish=True,
)
turn_of = task_of(
    handle,
    "turn_of",
    idempotency_key="{order}",
    idempotency_until="finished",
    idempotency_dedupe_publish=True,
)
burst_of = task_of(
    handle,
    "burst_of",
    idempotency_key="{order}",
    idempotency_until="started",
    idempotency_dedupe_publish=True,
)
each_message = task_of(handle_in_turn, "each_message", idempotency_key=TASK_ID)


def peak(notes: list[str]) -> int:
    """Returns how many executions ran at once, at most."""
    running = peak = 0
    for note in notes:
        running += 1 if note.startswith("start") else -1
        peak = max(peak, running)
    return peak
