"""Reservations of a key, or of its next turn, for one message."""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.record import layout, turn
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
    waiting = turn.waiting(record)
    return waiting and Reservation(waiting.task_id)
