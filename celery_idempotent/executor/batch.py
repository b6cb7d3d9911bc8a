"""The flow for many calls at once: one round trip begins them all, one completes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from celery_idempotent.errors import (
    ConflictError,
    CorruptRecordError,
    IdempotencyError,
    LeaseLostError,
    PoisonedTaskError,
    StoreUnavailableError,
)
from celery_idempotent.events import table
from celery_idempotent.events.report import decide, decide_by, refuse, report
from celery_idempotent.executor import conflict
from celery_idempotent.executor.active_execution import (
    WRITE_RETRY_INTERVAL,
    ActiveExecution,
    release_command,
)
from celery_idempotent.executor.batch_transaction import commit_many
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.executor import (
    EXECUTION_ID_BYTES,
    BeginRequest,
    begin_command,
    without_store,
)
from celery_idempotent.executor.outcome import Failure, Outcome
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.settle import complete_command, report_completed, report_released
from celery_idempotent.executor.transaction import UnrecordedExecution, reopen
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import PayloadCodec, not_stored
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.sql.transaction import Transaction
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

#: What a call may do: run, run without protection, return a stored outcome, or why none of these.
Admission = ActiveExecution | BaseExecution | Record | IdempotencyError


async def begin_many(
    calls: Sequence[ExecutorCall], runtime: Runtime, codec: PayloadCodec
) -> list[Admission]:
    """What each of `calls` may do. No call waits for a key that is held.

    Raises:
        StoreUnavailableError: if no server of Redis replies, and the policy is ``raise``.
    """
    try:
        return await _begin_many(calls, runtime, codec)
    except BaseException as error:
        for call in calls:
            decide_by(call, error)
        raise


async def _begin_many(
    calls: Sequence[ExecutorCall], runtime: Runtime, codec: PayloadCodec
) -> list[Admission]:
    begins = [begin_command(call, os.urandom(EXECUTION_ID_BYTES)) for call in calls]
    admissions: list[Admission] = []
    # Again if the process was suspended until the leases had expired, or a row has the outcome of a
    # poisoned key.
    for _ in range(2):
        sent_at = monotonic()
        try:
            replies = await runtime.execute_all(begins)
        except StoreUnavailableError as error:
            admissions = [_without_reply(call, runtime, codec, error) for call in calls]
            if refusals := [each for each in admissions if isinstance(each, IdempotencyError)]:
                raise refusals[0] from None
            return admissions
        admissions = [
            _admission(call, reply, runtime, codec, sent_at)
            for call, reply in zip(calls, replies, strict=True)
        ]
        reopened = await _reopen(calls, admissions, runtime, codec)
        if not reopened and all(
            each.lease.trusted for each in admissions if isinstance(each, ActiveExecution)
        ):
            break
    admissions = [
        (isinstance(each, Record) and _poisoned(each)) or each  # its error, instead of the record
        for each in admissions
    ]
    for call, admission in zip(calls, admissions, strict=True):
        _report(call, admission)
    if not any(isinstance(admission, StoreUnavailableError) for admission in admissions):
        runtime.store.outage.end()
        return admissions
    return [
        _without_reply(call, runtime, codec, admission)
        if isinstance(admission, StoreUnavailableError)
        else admission
        for call, admission in zip(calls, admissions, strict=True)
    ]


async def _reopen(
    calls: Sequence[ExecutorCall],
    admissions: list[Admission],
    runtime: Runtime,
    codec: PayloadCodec,
) -> bool:
    """Deletes the records of poisoned keys that a transaction has committed. Returns if any."""
    reopened = False
    for n, (call, admission) in enumerate(zip(calls, admissions, strict=True)):
        if call.settings.transaction is None or not isinstance(admission, Record):
            continue
        if layout.is_poisoned(admission):
            try:
                reopened |= await reopen(BeginRequest(call, runtime, codec), admission)
            except StoreUnavailableError as error:
                admissions[n] = error
    return reopened


def _report(call: ExecutorCall, admission: Admission) -> None:
    """Reports the decision about `call`, unless there was no reply."""
    if isinstance(admission, ActiveExecution):
        if call.settings.transaction is None:  # else, when the row is claimed
            admission.decide()
    elif isinstance(admission, Record):
        report(table.REPLAYED, call, record=admission)
    elif isinstance(admission, ConflictError):
        decide(table.CONFLICT, call)
    elif isinstance(admission, IdempotencyError) and not isinstance(
        admission, StoreUnavailableError
    ):
        refuse(call, admission)


def _without_reply(
    call: ExecutorCall, runtime: Runtime, codec: PayloadCodec, error: StoreUnavailableError
) -> Admission:
    """What `call` may do if other servers have replied: one node of a cluster is unavailable."""
    try:
        return without_store(call, runtime, codec, call.unanswered_ids, error)
    except StoreUnavailableError as refusal:
        return refusal


def _admission(
    call: ExecutorCall,
    reply: Reply | IdempotencyError,
    runtime: Runtime,
    codec: PayloadCodec,
    sent_at: float,
) -> Admission:
    if isinstance(reply, IdempotencyError):
        return reply
    if reply.case == "begun":
        return ActiveExecution(call, layout.begun(reply.raw), runtime, codec, sent_at)
    if reply.case == "corrupt":
        return layout.corrupt(str(call.key))
    try:
        record = runtime.store.record(call.key, reply.raw)
    except CorruptRecordError as error:
        return error
    if reply.case == "reused":
        return conflict.reused(record)
    if reply.case in ("finished", "sent"):
        return record
    return conflict.held(call, record)


def _poisoned(record: Record) -> PoisonedTaskError | None:
    return record.outcome() if layout.is_poisoned(record) else None


async def complete_many(
    values: Sequence[tuple[ActiveExecution, Any]],
    runtime: Runtime,
    transaction: Transaction | None = None,
) -> list[IdempotencyError | None]:
    """Stores each value. Returns None for each that is stored, else the error.

    Writes are repeated while Redis is unavailable, until the leases expire.

    Args:
        transaction: is committed first; its rows decide, whatever Redis replies.

    Raises:
        Exception: why the transaction is not committed; the keys are released.
    """
    executions = [active for active, _ in values]
    try:
        completions = [await complete_command(active, value) for active, value in values]
        if transaction is not None and executions:
            await commit_many(executions, [command for command, _ in completions], transaction)
    except BaseException as error:
        if transaction is not None:
            transaction.rollback()
            reason = f"the transaction of the batch ended with {type(error).__name__}"
            await release_many(executions, runtime, IdempotencyError(reason))
        raise
    errors: list[IdempotencyError | None] = []
    try:
        replies = await _persist_many(executions, [command for command, _ in completions], runtime)
    finally:
        for active in executions:
            active.finish()
    for active, reply, (_, outcome) in zip(executions, replies, completions, strict=True):
        if transaction is not None and isinstance(reply, IdempotencyError):
            active.report(table.COMMITTED_ONLY, error=reply)
            errors.append(_not_stored(active, outcome))
        elif isinstance(reply, IdempotencyError):
            active.report(table.OUTCOME_UNSAVED, error=reply)
            errors.append(reply)
        elif reply.case == "ok" or transaction is not None:
            active.call.own_outcome = True
            report_completed(active)
            if active.has_steps:
                await active.steps.discard()
            errors.append(_not_stored(active, outcome))
        else:
            active.report_lease_lost(reply.raw)
            await active.discard_outcome()
            errors.append(
                LeaseLostError(f"{active.execution.key}: another execution has taken over")
            )
    return errors


def _not_stored(active: ActiveExecution, outcome: Outcome) -> IdempotencyError | None:
    """Why the record of a completed execution does not have the value that it should have."""
    if isinstance(outcome, Failure):
        assert isinstance(outcome.error, IdempotencyError)
        return outcome.error
    assert active.outcome is not None
    payload, field = active.outcome
    if payload.has_value or not active.call.settings.store_result:
        return None
    return not_stored(payload, active.execution.key, field)


async def _persist_many(
    executions: Sequence[ActiveExecution], outcomes: Sequence[Command], runtime: Runtime
) -> list[Reply | IdempotencyError]:
    results: list[Reply | IdempotencyError] = [Reply("lost", b"", 0)] * len(executions)
    pending = [n for n, each in enumerate(executions) if not isinstance(each, UnrecordedExecution)]
    since = monotonic()
    while pending:
        replies: Sequence[Reply | IdempotencyError]
        try:
            replies = await runtime.execute_all([outcomes[n] for n in pending])
        except StoreUnavailableError as error:
            replies = [error] * len(pending)
        again = []
        for n, reply in zip(pending, replies, strict=True):
            if isinstance(reply, StoreUnavailableError) and executions[n].should_retry(since):
                again.append(n)
            elif not isinstance(reply, CorruptRecordError):
                results[n] = reply
        pending = again
        if pending:
            await runtime.sleep(WRITE_RETRY_INTERVAL)
    return results


async def release_many(
    executions: Sequence[ActiveExecution], runtime: Runtime, reason: IdempotencyError
) -> None:
    """Releases all keys. One that cannot be released is free when its lease expires."""
    executions = [each for each in executions if not isinstance(each, UnrecordedExecution)]
    for active in executions:
        # First, so that the heartbeat does not take a released key for a lost lease.
        active.finish()
    try:
        replies = await runtime.execute_all(
            [release_command(active.call, active.execution.token) for active in executions]
        )
    except StoreUnavailableError as error:
        logger.warning(
            "%d keys cannot be released: %s; their leases will expire", len(executions), error
        )
        return
    for active, reply in zip(executions, replies, strict=True):
        if isinstance(reply, IdempotencyError):
            active.report(table.NOT_RELEASED, error=reply)
        elif reply.case == "ok":
            report_released(active, "did not complete", reason)
        else:
            active.report_lease_lost(reply.raw)
