"""Answering from the record."""

from __future__ import annotations

from typing import Any

from celery_idempotent import signals
from celery_idempotent.errors import ResultNotStoredError
from celery_idempotent.gate.caller import Caller
from celery_idempotent.record.record import Record, State


def replay(call: Caller, record: Record) -> Any:
    """The result that a finished `record` holds.

    Raises:
        BaseException: the stored error, if that was the outcome.
        ResultNotStoredError: if the value was not kept.
        CorruptRecordError: if it cannot be read.
        NotReadyError: if it is the result of a task that has not ended.
    """
    try:
        outcome = record.outcome()
    except ResultNotStoredError as error:
        outcome = call.remembered(record, error)
    call.replayed(record)
    signals.send(signals.replayed, call.sender, task_id=call.task_id, key=record.key, record=record)
    if record.state is State.FAILED:
        raise outcome
    return outcome
