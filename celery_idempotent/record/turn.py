"""The record of a turn: of a key that may run again (``idempotency_until``)."""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.record import layout, steps
from celery_idempotent.record.record import Record


class Waiting(NamedTuple):
    """The message that has the next turn reserved."""

    task_id: str
    #: End of the reservation, in milliseconds.
    until_ms: int


def waiting(record: Record) -> Waiting | None:
    """Returns the message that waits while another one has the turn; None if there is none.

    Raises:
        CorruptRecordError: if the entry is cut short.
    """
    if record.state.finished:
        return None
    entry = steps.waiting(record.body, record.key)
    return None if entry is None else Waiting(layout.read_task_id(entry[0]), entry[1])
