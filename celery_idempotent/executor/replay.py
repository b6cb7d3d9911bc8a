"""Answering a call from the record of an earlier one."""

from __future__ import annotations

from typing import NoReturn

from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    ResultDiscardedError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.events import table
from celery_idempotent.events.report import decide, refuse, report
from celery_idempotent.executor import conflict
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store.record_store import RecordStore


async def replay(call: ExecutorCall, record: Record, codec: PayloadCodec) -> Outcome:
    """The outcome that a finished `record` holds.

    Raises:
        ResultNotStoredError: if the record does not have the value.
        CorruptRecordError: if the value cannot be decoded.
        StoreUnavailableError: if the value is offloaded and its storage is unavailable.
        NotReadyError: if another task gives the result and has not ended.
    """
    try:
        outcome, failed = await codec.decode_outcome(record)
        if isinstance(outcome, ResultNotStoredError) and record.task_id == call.task_id:
            raise outcome
    except (ResultNotStoredError, CorruptRecordError) as error:
        # First, since what follows is sent once, whatever recover_result raises.
        call.replayed(record)
        try:
            outcome, failed = call.recover_result(record, error), False
        except ResultDiscardedError:
            report(table.REPLAYED, call, record=record)
            raise
        except (ResultNotStoredError, CorruptRecordError) as refusal:
            refuse(call, refusal)
            raise
    call.replayed(record)
    if failed and layout.is_poisoned(record):
        refuse(call, outcome)
    else:
        report(table.REPLAYED, call, record=record)
    return Failure(outcome) if failed else Result(outcome)


async def replay_or_refuse(call: ExecutorCall, record: Record, codec: PayloadCodec) -> Outcome:
    """As :func:`replay`; refuses or requeues the call if the outcome is not available yet."""
    try:
        return await replay(call, record, codec)
    except NotReadyError:
        conflict.refuse(call, record)
    except StoreUnavailableError as error:
        _requeue_without_offload(call, error)


async def write_result(
    call: ExecutorCall, record: Record, outcome: Outcome, store: RecordStore
) -> None:
    """Writes the replayed value for the result backend, where that takes one round trip less.

    A redelivery finds its result there, which Celery leaves as it is.
    """
    if isinstance(outcome, Result) and record.task_id != call.task_id:
        result = call.backend_result(outcome.value)
        if result is not None:
            call.result_written = await store.write_result(call.key, result)


def _requeue_without_offload(call: ExecutorCall, error: StoreUnavailableError) -> NoReturn:
    """The outcome exists and cannot be fetched: requeue or fail, but never run."""
    report(table.OUTCOME_UNAVAILABLE, call, error=error)
    if call.settings.on_store_error == "raise":
        raise refuse(call, error)
    decide(table.STORE_UNAVAILABLE, call)
    conflict.requeue(call, call.unanswered_ids, error)
