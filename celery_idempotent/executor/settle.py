"""The end of an execution: its outcome is stored, or its key is released."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from celery_idempotent.errors import (
    CorruptRecordError,
    LeaseLostError,
    NotReadyError,
    StoreUnavailableError,
)
from celery_idempotent.events import table
from celery_idempotent.executor import conflict, transaction
from celery_idempotent.executor.active_execution import FREE, ActiveExecution
from celery_idempotent.executor.call import Delegate, Fail, Release
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.replay import replay
from celery_idempotent.executor.returned import restored
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import DELEGATED, RESULT_IGNORED
from celery_idempotent.payload.fields import ERROR, RESULT
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply


async def settle(active: ActiveExecution, outcome: Outcome) -> Outcome:
    """Stores `outcome`, or releases the key. Returns the outcome that counts.

    Raises:
        BaseException: what the caller raises to be requeued, if another execution has taken over.
    """
    try:
        return await _settle(active, outcome)
    except GeneratorExit:
        raise
    except BaseException as error:
        if active.settled:
            raise
        # Raised by a signal handler. The body has ended, so its outcome is still to be stored.
        active.exiting = not isinstance(error, Exception)
        outcome = await _settle_again(active, outcome)
        if active.exiting:
            raise
        active.report(table.ENDED_LATE, error=error)
        return outcome


async def _settle_again(active: ActiveExecution, outcome: Outcome) -> Outcome:
    try:
        return await _settle(active, outcome)
    except Exception as error:
        if not active.settled and isinstance(outcome, Result):
            active.report(table.OUTCOME_UNSAVED, error=error)
        raise


async def _settle(active: ActiveExecution, outcome: Outcome) -> Outcome:
    call = active.call
    if isinstance(outcome, Result):
        if call.rescheduled:
            return await _release(active, outcome, call.rescheduled)
        if call.ending is not None:
            return await _settle(active, Failure(call.ending))
        return await _complete(active, outcome.value)
    error = outcome.error
    if isinstance(error, LeaseLostError) and not active.lease.trusted:
        return await _abort(active, outcome)
    disposition = call.disposition(error)
    if isinstance(disposition, Fail):
        return await _fail(active, outcome)
    if isinstance(disposition, Delegate):
        return await _delegate(active, outcome, disposition)
    return await _release(active, outcome, disposition)


async def _complete(active: ActiveExecution, value: Any) -> Outcome:
    command, outcome = await complete_command(active, value)
    if active.transaction is not None:
        instead = await transaction.commit(active, command)
        if instead is not None:
            return instead if active.settled else await _settle(active, instead)
    reply = await _store(active, command)
    if reply is None:
        return outcome
    if reply.case == "lost" and active.transaction is None:
        await active.discard_outcome()
        return await _resolve_lost_lease(active, reply, outcome)
    active.call.own_outcome = True
    active.call.result_written = reply.case == "written"
    if not active.call.dropped_continuation:
        active.continue_call()
    report_completed(active)
    if active.has_steps:
        await active.steps.discard()
    return outcome


async def complete_command(active: ActiveExecution, value: Any) -> tuple[Command, Outcome]:
    """The command that stores `value`, and what the caller gets."""
    call, codec = active.call, active.codec
    execution, settings = active.execution, call.settings
    outcome: Outcome = Result(value)
    if call.returns_restored:
        payload, outcome = restored(value, settings, codec.values, key=execution.key)
        payload = await codec.protect(payload, settings, key=execution.key, token=execution.token)
    else:
        payload = await codec.encode_result(
            value, settings, key=execution.key, token=execution.token
        )
    active.outcome = payload, RESULT
    command = commands.complete(
        call.key,
        execution.token,
        payload,
        settings.result_ms,
        call.backend_result(value),
        sending_ms=0 if call.dropped_continuation else call.sending_ms,
    )
    return command, outcome


async def _fail(active: ActiveExecution, outcome: Failure) -> Outcome:
    call = active.call
    payload = await _encode_error(active, outcome.error)
    command = commands.fail(
        call.key,
        active.execution.token,
        payload,
        call.settings.error_ms,
        sending_ms=call.sending_ms,
    )
    if active.transaction is not None:
        instead = await transaction.commit(active, command)
        if instead is not None:
            return instead if active.settled else await _release(active, instead, FREE)
    since = monotonic()
    reply = await _store(active, command)
    if reply is None:
        return outcome
    if reply.case != "ok" and active.transaction is None:
        await active.discard_outcome()
        return await _resolve_lost_lease(active, reply, outcome)
    call.own_outcome = True
    active.continue_call()
    if not payload.format:
        _report_not_stored(active, f"ran and raised {type(outcome.error).__name__}", payload)
    gets = "this error" if payload.format else "ResultNotStoredError"
    active.report(table.FAILED, error=outcome.error, outcome=gets)
    if active.has_steps:
        # Not after the record: the next execution would find them.
        active.steps.limit_rows(call.settings.error_ms - round((monotonic() - since) * 1000))
        await active.steps.discard()
    return outcome


async def _encode_error(active: ActiveExecution, error: BaseException) -> Payload:
    execution = active.execution
    payload = await active.codec.encode_error(
        error, active.call.settings, key=execution.key, token=execution.token
    )
    active.outcome = payload, ERROR
    return payload


async def _delegate(active: ActiveExecution, outcome: Failure, disposition: Delegate) -> Outcome:
    """Duplicates get the result of the task that has replaced this one under its id.

    That task has the continuation, so this one has none to send.
    """
    call = active.call
    # A caller that waits for a result which never comes runs when the record expires.
    body = layout.write_replacement(disposition.awaited, call.task_id, active.steps.finished)
    result = Payload(DELEGATED if disposition.stores_result else RESULT_IGNORED, body)
    command = commands.complete(
        call.key, active.execution.token, result, call.settings.result_ms, sending_ms=0
    )
    if active.transaction is not None:
        instead = await transaction.commit(active, command)
        if instead is not None:
            return instead if active.settled else await _release(active, instead, FREE)
    reply = await _store(active, command)
    if reply is not None and reply.case == "ok":
        active.report(table.COMPLETED, end="it has replaced itself and gets the outcome of that")
    return outcome


async def _release(active: ActiveExecution, outcome: Outcome, disposition: Release) -> Outcome:
    error = outcome.error if isinstance(outcome, Failure) else None
    if error is not None and not disposition.hold and transaction.should_retry(active, error):
        await transaction.retry(active, error)
    payload = None
    if disposition.final and error is not None:
        payload = await _encode_error(active, error)
    # First, so that the heartbeat does not take the released key for a lost lease.
    active.finish()
    try:
        reply = await active.release(disposition, payload)
    except (StoreUnavailableError, CorruptRecordError) as failure:
        active.report(table.NOT_RELEASED, error=failure)
        return outcome
    if reply.case == "ok":
        active.call.own_outcome = disposition.final
        if payload is not None:
            active.continue_call()
        report_released(
            active,
            f"ran and raised {type(error).__name__}" if error else "ran",
            error,
            disposition.hold,
        )
        return outcome
    await active.discard_outcome()
    if disposition.hold or not isinstance(error, Exception):
        # The retry is published already, or the process is about to exit.
        active.report_lease_lost(reply.raw)
        return outcome
    return await _resolve_lost_lease(active, reply, outcome)


async def _abort(active: ActiveExecution, outcome: Failure) -> Outcome:
    """The body was stopped because its lease is lost: return what another execution stores."""
    try:
        reply = await active.release()
    except (StoreUnavailableError, CorruptRecordError):
        _requeue(active)
    if reply.case == "ok":
        _requeue(active)
    return await _resolve_lost_lease(active, reply, outcome)


async def _store(active: ActiveExecution, outcome: Command) -> Reply | None:
    """Stores the outcome; None if Redis stays unavailable."""
    reply = None
    try:
        reply = await active.persist(outcome)
    except StoreUnavailableError as error:
        if active.transaction is None:
            active.report(table.OUTCOME_UNSAVED, error=error)
        else:
            active.report(table.COMMITTED_ONLY, error=error)
    active.settled = True
    active.finish()
    return reply


def report_completed(active: ActiveExecution) -> None:
    """Reports that the result is stored, or only that the key has completed."""
    assert active.outcome is not None
    payload, _ = active.outcome
    end = "its result is stored" if payload.has_value else "its result is not kept"
    if not payload.has_value and active.call.settings.store_result:
        _report_not_stored(active, "ran", payload)
    active.report(table.COMPLETED, end=end)


def report_released(
    active: ActiveExecution, end: str, error: BaseException | None, hold: float = 0.0
) -> None:
    """Reports that the key is free, or reserved for a retry for `hold` seconds."""
    key_is = f"stays reserved for its retry for {hold:.1f} s" if hold else "is free"
    active.report(
        table.RELEASED, end=end, key_is=key_is, error=error, reserved_seconds=hold or None
    )


def _report_not_stored(active: ActiveExecution, end: str, payload: Payload) -> None:
    active.report(table.NOT_STORED, end=end, reason=payload.body.decode())


async def _resolve_lost_lease(active: ActiveExecution, reply: Reply, outcome: Outcome) -> Outcome:
    """The outcome was refused: return the other execution's, or requeue until there is one."""
    active.report_lease_lost(reply.raw)
    record = _winning_record(active, reply)
    if record is None:
        active.report(table.RECORD_GONE)
        return outcome
    # Only begin can tell whether this call has to send what follows it.
    if record.state.finished and not active.call.continues:
        # A task that has replaced the other one may still run; the offload storage may be down.
        with contextlib.suppress(NotReadyError, StoreUnavailableError):
            return await replay(active.call, record, active.codec)
    _requeue(active)


def _winning_record(active: ActiveExecution, reply: Reply) -> Record | None:
    try:
        if not reply.raw or layout.is_absent(reply.raw):
            return None
        return active.runtime.store.record(active.call.key, reply.raw)
    except CorruptRecordError:
        return None


def _requeue(active: ActiveExecution) -> NoReturn:
    lost = LeaseLostError(f"{active.execution.key}: another execution may run")
    conflict.requeue(active.call, active.call.unanswered_ids, lost)
