"""The record of the turn of a key that may run again (``idempotency_until``).

Its body is one entry for the waiting message: length of the rest (4 bytes), length of the name (2:
zero), W, zero (7), end of its reservation (6), length of the task id (2) and the task id, length of
the fingerprint (1) and the fingerprint. Only the scripts write it: lua/prelude.lua.
"""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.record import layout, steps
from celery_idempotent.record.record import Record


class Waiting(NamedTuple):
    """The message that the next turn is reserved for."""

    task_id: str
    #: End of the reservation, in milliseconds.
    until_ms: int


def waiting(record: Record) -> Waiting | None:
    """Returns the message that waits while another one has the turn; None if there is none.

    Raises:
        CorruptRecordError: if the entry is damaged.
    """
    if record.state.finished or record.body[4:7] != b"\0\0W":
        return None
    try:
        entry, _ = steps.read_field(record.body, 0, 4)
        encoded, _ = steps.read_field(entry, 16, 2)
        task_id = layout.read_task_id(encoded)
    except (IndexError, ValueError):
        raise steps.corrupt("turn", record.key) from None
    return Waiting(task_id, int.from_bytes(entry[10:16], "big"))
