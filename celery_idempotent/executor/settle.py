"""The end of an execution: its outcome is stored, its key given back, or it came too late."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, NoReturn

from celery_idempotent import signals
from celery_idempotent.errors import (
    CorruptRecordError,
    LeaseLostError,
    NotReadyError,
    StoreUnavailableError,
)
from celery_idempotent.executor import conflict
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.call import Delegate, Fail, Release
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.replay import replay
from celery_idempotent.payload.codec import DELEGATED, ERROR, NOT_STORED, RESULT, RESULT_IGNORED
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)


async def settle(active: ActiveExecution, outcome: Outcome) -> Outcome:
    """Store `outcome`, or give the key back; return it, or what a rival that came first has stored.

    Raises:
        BaseException: what the caller raises to come back for the outcome of a rival that runs.
    """
    try:
        return await _settle(active, outcome)
    except GeneratorExit:
        raise
    except BaseException as struck:
        if active.settled:
            raise
        # By a signal whose handler raises. The work is done: what is left is to say so.
        active.in_haste = not isinstance(struck, Exception)
        outcome = await _again(active, outcome)
        if active.in_haste:
            raise
        logger.warning("%s: %r struck after the work had ended", active.execution.key, struck)
        return outcome


async def _again(active: ActiveExecution, outcome: Outcome) -> Outcome:
    try:
        return await _settle(active, outcome)
    except Exception as error:
        if not active.settled and isinstance(outcome, Result):
            unsaved(active, error)
        raise


async def _settle(active: ActiveExecution, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure):
        return await _with_error(active, outcome)
    if active.call.rescheduled:
        return await _release(active, outcome, active.call.rescheduled)
    answer = await _store(active, await completing(active, outcome.value))
    if answer is None:
        return outcome
    if answer.case != "ok":
        await active.discard_outcome()
        return await _resolve_lost_lease(active, answer, outcome)
    active.call.own_outcome = True
    if active.call.stopped:
        await _continued(active)
    active.send(signals.completed)
    await active.steps.discard()
    return outcome


async def _continued(active: ActiveExecution) -> None:
    """Nothing is left to follow the outcome: no redelivery sends what its message came with."""
    with contextlib.suppress(StoreUnavailableError):
        await active.persist(commands.mark_continued(active.call.key, active.call.task_id))


async def completing(active: ActiveExecution, value: Any) -> Command:
    """The command that stores `value`."""
    call = active.call
    result = await _payload(active, value)
    active.outcome = result, RESULT
    return commands.complete(call.key, active.execution.token, result, call.settings.result_ms)


async def _with_error(active: ActiveExecution, outcome: Failure) -> Outcome:
    error = outcome.error
    if isinstance(error, LeaseLostError) and not active.lease.trusted:
        return await _stopped(active, outcome)
    disposition = active.call.disposition(error)
    if isinstance(disposition, Fail):
        return await _fail(active, outcome)
    if isinstance(disposition, Delegate):
        return await _delegate(active, outcome, disposition)
    return await _release(active, outcome, disposition)


async def _payload(active: ActiveExecution, value: Any) -> Payload:
    if not active.call.settings.store_result:
        return Payload("", NOT_STORED)
    return _told(active, await active.payload(value), RESULT)


def _told(active: ActiveExecution, payload: Payload, field: str) -> Payload:
    if not payload.has_value:
        logger.error(
            "%s: the %s of task %s is not kept: %s; duplicates will get ResultNotStoredError",
            active.execution.key,
            field,
            active.call.task_id,
            payload.body.decode(),
        )
    return payload


async def _store(active: ActiveExecution, outcome: Command) -> Reply | None:
    """Store the outcome; None if Redis stays away."""
    answer = None
    try:
        answer = await active.persist(outcome)
    except StoreUnavailableError as error:
        unsaved(active, error)
    active.settled = True
    active.finish()
    return answer


def unsaved(active: ActiveExecution, error: Exception) -> None:
    """Tell that the outcome could not be stored."""
    logger.critical(
        "%s: the outcome of task %s is not stored: %s; a duplicate may run again",
        active.execution.key,
        active.call.task_id,
        error,
    )
    active.send(signals.outcome_unsaved, error=error)


async def _delegate(active: ActiveExecution, outcome: Failure, disposition: Delegate) -> Outcome:
    """Duplicates get the result of the task that has taken this one's place and id.

    That task has taken the continuation with it, so the note that it is out is due at once.
    """
    call = active.call
    # Who waits for a result that never comes waits for the end of the record, and runs again.
    body = layout.write_replacement(disposition.awaited, call.task_id, active.steps.finished)
    result = Payload(DELEGATED if disposition.told else RESULT_IGNORED, body)
    answer = await _store(
        active,
        commands.complete(call.key, active.execution.token, result, call.settings.result_ms),
    )
    if answer is not None and answer.case == "ok":
        await _continued(active)
        active.send(signals.completed)
    return outcome


async def _fail(active: ActiveExecution, outcome: Failure) -> Outcome:
    call = active.call
    payload = _told(active, await active.error_payload(outcome.error), ERROR)
    active.outcome = payload, ERROR
    answer = await _store(
        active,
        commands.fail(call.key, active.execution.token, payload, call.settings.error_ms),
    )
    if answer is None:
        return outcome
    if answer.case != "ok":
        await active.discard_outcome()
        return await _resolve_lost_lease(active, answer, outcome)
    call.own_outcome = True
    active.send(signals.failed, error=outcome.error)
    await active.steps.discard()
    return outcome


async def _release(active: ActiveExecution, outcome: Outcome, disposition: Release) -> Outcome:
    error = outcome.error if isinstance(outcome, Failure) else None
    payload = None
    if disposition.final and error is not None:
        payload = await active.error_payload(error)
        active.outcome = payload, ERROR
    # First, so that the heartbeat does not find the key free and take it for a loss.
    active.finish()
    try:
        answer = await active.release(disposition, payload)
    except (StoreUnavailableError, CorruptRecordError) as trouble:
        logger.warning(
            "%s: the key is not given back: %s; its lease ends by itself",
            active.execution.key,
            trouble,
        )
        return outcome
    if answer.case == "ok":
        active.call.own_outcome = disposition.final
        active.send(signals.released, error=error, reserved_seconds=disposition.hold or None)
        return outcome
    await active.discard_outcome()
    if disposition.hold or not isinstance(error, Exception):
        # The retry is on its way and will meet the rival; an exit is not to be argued with.
        active.report_lease_lost()
        return outcome
    return await _resolve_lost_lease(active, answer, outcome)


async def _stopped(active: ActiveExecution, outcome: Failure) -> Outcome:
    """The work stopped because the lease is lost: what a rival makes of it is the answer."""
    try:
        answer = await active.release()
    except (StoreUnavailableError, CorruptRecordError):
        _requeue(active)
    if answer.case == "ok":
        _requeue(active)
    return await _resolve_lost_lease(active, answer, outcome)


async def _resolve_lost_lease(active: ActiveExecution, answer: Reply, outcome: Outcome) -> Outcome:
    """The outcome was refused: the caller gets the winner's, now or when there is one."""
    active.report_lease_lost()
    record = _winning_record(active, answer)
    if record is None:
        # Forgotten by an operator, or by Redis. Nobody else has an answer.
        return outcome
    if record.state.finished:
        # It may not be told yet: by a task that has taken the rival's place, or by the depot.
        with contextlib.suppress(NotReadyError, StoreUnavailableError):
            return await replay(active.call, record, active.runtime, active.codec)
    _requeue(active)


def _winning_record(active: ActiveExecution, answer: Reply) -> Record | None:
    try:
        if not answer.raw or layout.is_absent(answer.raw):
            return None
        return active.runtime.store.record(active.call.key, answer.raw)
    except CorruptRecordError:
        return None


def _requeue(active: ActiveExecution) -> NoReturn:
    lost = LeaseLostError(f"{active.execution.key}: another execution may run")
    conflict.requeue(active.call, active.call.unanswered_ids, lost)
