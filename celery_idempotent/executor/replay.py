"""Answering a call from the record of an earlier one."""

from __future__ import annotations

from celery_idempotent.errors import CorruptRecordError, PoisonedTaskError, ResultNotStoredError
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.decision import refuse, replayed
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record.record import Record


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
        # First, since the continuation is sent once, whatever recover_result raises.
        call.replayed(record)
        try:
            outcome, failed = call.recover_result(record, error), False
        except (ResultNotStoredError, CorruptRecordError) as refusal:
            refuse(call, refusal)
            raise
    call.replayed(record)
    if failed and isinstance(outcome, PoisonedTaskError) and not record.format:
        refuse(call, outcome)
    else:
        replayed(call, record)
    return Failure(outcome) if failed else Result(outcome)
