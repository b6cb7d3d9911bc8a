"""Replays: answers a call with the outcome of an earlier call, or of the task that replaced it."""

from __future__ import annotations

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report, report_refused
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.values import Answer, End, Failure, Result
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.core.record.layout import DELEGATED
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    NotReadyError,
    ResultDiscardedError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.settings import Settings


async def replay(call: Call, record: Record, *, sends: bool = False) -> Answer:
    """Answers `call` with the outcome that a finished `record` holds.

    The continuation of one message is sent once. A duplicate, another message, sends its own.

    Args:
        sends: whether the call has the right to send the continuation of `record`.

    Raises:
        StoreUnavailableError: if the value is offloaded and its storage is unavailable.
        NotReadyError: if the outcome is the result of another task, which has not ended.
    """
    missing: IdempotencyError | None = None
    try:
        outcome, failed = await call.codec.decode_outcome(record)
        if isinstance(outcome, ResultNotStoredError) and record.task_id == call.task_id:
            missing = outcome
    except (ResultNotStoredError, CorruptRecordError) as error:
        missing = error
    if sends:
        call.continuation_token = record.token
    completed = record.state is State.COMPLETED and not layout.is_superseded(record)
    sent = completed and record.task_id == call.task_id and not sends
    if missing is not None:
        try:
            outcome, failed = call.host.recover_result(record, missing), False
        except (ResultNotStoredError, CorruptRecordError) as refusal:
            if isinstance(refusal, ResultDiscardedError):
                report(table.REPLAYED, call, record=record)
            else:
                report_refused(call, refusal)
            return Answer(
                Failure(refusal), record, replayed=True, refused=True, continuation_sent=sent
            )
        except Exception as recovered:
            outcome, failed = recovered, True
    if failed and (layout.is_poisoned(record) or layout.is_replaced(record)):
        report_refused(call, outcome)
    else:
        report(table.REPLAYED, call, record=record)
        if call.data.put_back_count and record.finished_at is not None:
            late = call.runtime.store.now_ms() - record.at_ms
            report(table.WAIT_ENDED, call, answered=table.answered(late))
    answer = Result(outcome) if not failed else Failure(outcome)
    return Answer(answer, record, replayed=True, continuation_sent=sent)


async def replay_or_put_back(call: Call, record: Record, *, sends: bool = False) -> End:
    """As :func:`replay`; applies the policies if the outcome is not available yet."""
    try:
        return await replay(call, record, sends=sends)
    except NotReadyError:
        return conflict.apply_policy(call, record)
    except StoreUnavailableError as error:
        # The call must not run, because it has an outcome. That cannot be fetched now, so the call
        # is put back, or fails.
        report(table.OUTCOME_UNAVAILABLE, call, error=error)
        if call.settings.on_store_error == "raise":
            raise report_refused(call, error) from None
        report(table.STORE_UNAVAILABLE, call)
        return conflict.put_back(call, error)


def replacement_error(record: Record, settings: Settings) -> Exception | None:
    """Returns the error of a replacement that frees the key of `record`; reads the result backend.

    None if no other task has replaced this one, if the replacement has not ended or has a result,
    or if duplicates get the error.
    """
    if record.format != DELEGATED:
        return None
    try:
        record.outcome()
    except (NotReadyError, ResultNotStoredError, CorruptRecordError, StoreUnavailableError):
        return None
    except Exception as error:
        return None if settings.replays(error) else error
    return None
