"""Reservations of a key, or of its next turn, for one message.

The record of the turn of a key that may run again (``idempotency_until``) has one entry in its body
for the waiting message: length of the rest (4 bytes), length of the name (2: zero), W, zero (7),
end of its reservation (6), length of the task id (2) and the task id, length of the fingerprint (1)
and the fingerprint. Only the scripts write it: lua/prelude.lua.
"""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.record import layout, steps
from celery_idempotent.record.record import Record, State


class Reservation(NamedTuple):
    """A message that may begin before all others."""

    task_id: str
    #: The generation, within its root, of the retry that holds it; None for a message that was
    #: published with a reservation or waits for its turn.
    retry: int | None = None


def read(record: Record, raw: bytes) -> Reservation | None:
    """Returns the reservation in a record; None if there is none.

    Args:
        raw: the bytes of `record`.

    Raises:
        CorruptRecordError: if the owner or the entry of the waiting message is damaged.
    """
    if record.state is State.RESERVED:
        owner = layout.owner(raw)
        if owner == layout.NOBODY:
            return None
        try:
            retry = int(owner[layout.ID_BYTES :]) if owner else None
        except ValueError:
            raise layout.corrupt(record.key) from None
        return Reservation(record.task_id, retry)
    message = waiting(record)
    return message and Reservation(message.task_id)


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
