"""Errors of a call whose place a newer call has taken: see `extensions.replace` and `.newest`.

The body of the older call's record is then the task id of the newer one.
"""

from __future__ import annotations

from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import layout
from celery_idempotent.errors import CorruptRecordError, ReplacedError


def replaced(key: str, body: bytes) -> ReplacedError:
    """Returns the error of a call that was replaced.

    Args:
        body: the body of its record, which is the task id of the newer call.

    Raises:
        CorruptRecordError: if it names no call.
    """
    try:
        newer = layout.read_task_id(body)
    except ValueError:
        raise layout.corrupt(key) from None
    return ReplacedError(f"{key} was taken over by task {one_line(newer)}", newer)


def taken_over(raw: bytes, key: str, task: str) -> ReplacedError | None:
    """Returns the error of an execution whose record names a newer call; None if it names none."""
    try:
        record = layout.read(raw, key, task)
        is_named = layout.is_superseded(record) or layout.is_replaced(record)
        return replaced(key, record.body) if is_named else None
    except CorruptRecordError:
        return None
