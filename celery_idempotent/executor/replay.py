"""Answering from the record."""

from __future__ import annotations

from celery_idempotent import signals
from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record.record import Record, State


async def replay(
    call: ExecutorCall, record: Record, runtime: Runtime, codec: PayloadCodec
) -> Outcome:
    """The outcome that a finished `record` holds.

    Raises:
        ResultNotStoredError: if the value was not kept.
        CorruptRecordError: if it cannot be read.
        StoreUnavailableError: if the depot that it is in cannot be asked.
        NotReadyError: if it is the result of a task that has not ended.
    """
    failed = record.state is State.FAILED
    try:
        if codec.offloads:
            outcome = await runtime.run_in_thread(record.outcome)
        else:
            outcome = record.outcome()
        if isinstance(outcome, ResultNotStoredError) and record.task_id == call.task_id:
            raise outcome
    except (ResultNotStoredError, CorruptRecordError) as error:
        # First: what follows the call goes out once, even if this is all that it is told.
        call.replayed(record)
        outcome, failed = call.recover_result(record, error), False
    except (NotReadyError, StoreUnavailableError):
        raise
    except Exception as error:
        # Of the task that took this one's place: told like any stored one.
        outcome, failed = error, True
    call.replayed(record)
    signals.send(signals.replayed, call.sender, task_id=call.task_id, key=record.key, record=record)
    return Failure(outcome) if failed else Result(outcome)
