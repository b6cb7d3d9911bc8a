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
from celery_idempotent.executor.active_execution import Running
from celery_idempotent.executor.call import Delegate, Fail, Release
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.replay import replay
from celery_idempotent.payload.codec import DELEGATED, ERROR, NOT_WANTED, RESULT, UNTOLD
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)


async def settle(running: Running, outcome: Outcome) -> Outcome:
    """Store `outcome`, or give the key back; return it, or what a rival that came first has stored.

    Raises:
        BaseException: what the caller raises to come back for the outcome of a rival that runs.
    """
    try:
        return await _settle(running, outcome)
    except GeneratorExit:
        raise
    except BaseException as struck:
        if running.settled:
            raise
        # By a signal whose handler raises. The work is done: what is left is to say so.
        running.in_haste = not isinstance(struck, Exception)
        outcome = await _again(running, outcome)
        if running.in_haste:
            raise
        logger.warning("%s: %r struck after the work had ended", running.execution.key, struck)
        return outcome


async def _again(running: Running, outcome: Outcome) -> Outcome:
    try:
        return await _settle(running, outcome)
    except Exception as error:
        if not running.settled and isinstance(outcome, Result):
            unsaved(running, error)
        raise


async def _settle(running: Running, outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure):
        return await _with_error(running, outcome)
    if running.call.rescheduled:
        return await _release(running, outcome, running.call.rescheduled)
    answer = await _store(running, await completing(running, outcome.value))
    if answer is None:
        return outcome
    if answer.case != "ok":
        await running.discard_outcome()
        return await _too_late(running, answer, outcome)
    running.call.own_outcome = True
    if running.call.stopped:
        await _continued(running)
    running.send(signals.completed)
    await running.steps.discard()
    return outcome


async def _continued(running: Running) -> None:
    """Nothing is left to follow the outcome: no redelivery sends what its message came with."""
    with contextlib.suppress(StoreUnavailableError):
        await running.persist(commands.dispatched(running.call.key, running.call.task_id))


async def completing(running: Running, value: Any) -> Command:
    """The command that stores `value`."""
    call = running.call
    result = await _payload(running, value)
    running.outcome = result, RESULT
    return commands.complete(call.key, running.execution.token, result, call.settings.result_ms)


async def _with_error(running: Running, outcome: Failure) -> Outcome:
    error = outcome.error
    if isinstance(error, LeaseLostError) and not running.lease.trusted:
        return await _stopped(running, outcome)
    verdict = running.call.verdict(error)
    if isinstance(verdict, Fail):
        return await _fail(running, outcome)
    if isinstance(verdict, Delegate):
        return await _delegate(running, outcome, verdict)
    return await _release(running, outcome, verdict)


async def _payload(running: Running, value: Any) -> Payload:
    if not running.call.settings.store_result:
        return Payload("", NOT_WANTED)
    return _told(running, await running.payload(value), RESULT)


def _told(running: Running, payload: Payload, part: str) -> Payload:
    if not payload.kept:
        logger.error(
            "%s: the %s of task %s is not kept: %s; duplicates will get ResultNotStoredError",
            running.execution.key,
            part,
            running.call.task_id,
            payload.body.decode(),
        )
    return payload


async def _store(running: Running, outcome: Command) -> Reply | None:
    """Store the outcome; None if Redis stays away."""
    answer = None
    try:
        answer = await running.persist(outcome)
    except StoreUnavailableError as error:
        unsaved(running, error)
    running.settled = True
    running.over()
    return answer


def unsaved(running: Running, error: Exception) -> None:
    """Tell that the outcome could not be stored."""
    logger.critical(
        "%s: the outcome of task %s is not stored: %s; a duplicate may run again",
        running.execution.key,
        running.call.task_id,
        error,
    )
    running.send(signals.outcome_unsaved, error=error)


async def _delegate(running: Running, outcome: Failure, verdict: Delegate) -> Outcome:
    """Duplicates get the result of the task that has taken this one's place and id.

    That task has taken the continuation with it, so the note that it is out is due at once.
    """
    call = running.call
    # Who waits for a result that never comes waits for the end of the record, and runs again.
    body = layout.write_replacement(verdict.awaited, call.task_id, running.steps.finished)
    result = Payload(DELEGATED if verdict.told else UNTOLD, body)
    answer = await _store(
        running,
        commands.complete(call.key, running.execution.token, result, call.settings.result_ms),
    )
    if answer is not None and answer.case == "ok":
        await _continued(running)
        running.send(signals.completed)
    return outcome


async def _fail(running: Running, outcome: Failure) -> Outcome:
    call = running.call
    payload = _told(running, await running.error_payload(outcome.error), ERROR)
    running.outcome = payload, ERROR
    answer = await _store(
        running,
        commands.fail(call.key, running.execution.token, payload, call.settings.error_ms),
    )
    if answer is None:
        return outcome
    if answer.case != "ok":
        await running.discard_outcome()
        return await _too_late(running, answer, outcome)
    call.own_outcome = True
    running.send(signals.failed, error=outcome.error)
    await running.steps.discard()
    return outcome


async def _release(running: Running, outcome: Outcome, verdict: Release) -> Outcome:
    error = outcome.error if isinstance(outcome, Failure) else None
    payload = None
    if verdict.final and error is not None:
        payload = await running.error_payload(error)
        running.outcome = payload, ERROR
    # First, so that the heartbeat does not find the key free and take it for a loss.
    running.over()
    try:
        answer = await running.release(verdict, payload)
    except (StoreUnavailableError, CorruptRecordError) as trouble:
        logger.warning(
            "%s: the key is not given back: %s; its lease ends by itself",
            running.execution.key,
            trouble,
        )
        return outcome
    if answer.case == "ok":
        running.call.own_outcome = verdict.final
        running.send(signals.released, error=error, held_for=verdict.hold or None)
        return outcome
    await running.discard_outcome()
    if verdict.hold or not isinstance(error, Exception):
        # The retry is on its way and will meet the rival; an exit is not to be argued with.
        running.tell_loss()
        return outcome
    return await _too_late(running, answer, outcome)


async def _stopped(running: Running, outcome: Failure) -> Outcome:
    """The work stopped because the lease is lost: what a rival makes of it is the answer."""
    try:
        answer = await running.release()
    except (StoreUnavailableError, CorruptRecordError):
        _come_back(running)
    if answer.case == "ok":
        _come_back(running)
    return await _too_late(running, answer, outcome)


async def _too_late(running: Running, answer: Reply, outcome: Outcome) -> Outcome:
    """The outcome was refused: the caller gets the winner's, now or when there is one."""
    running.tell_loss()
    record = _rival(running, answer)
    if record is None:
        # Forgotten by an operator, or by Redis. Nobody else has an answer.
        return outcome
    if record.state.finished:
        # It may not be told yet: by a task that has taken the rival's place, or by the depot.
        with contextlib.suppress(NotReadyError, StoreUnavailableError):
            return await replay(running.call, record, running.world, running.payloads)
    _come_back(running)


def _rival(running: Running, answer: Reply) -> Record | None:
    try:
        if not answer.raw or layout.is_absent(answer.raw):
            return None
        return running.world.store.record(running.call.key, answer.raw)
    except CorruptRecordError:
        return None


def _come_back(running: Running) -> NoReturn:
    lost = LeaseLostError(f"{running.execution.key}: another execution may run")
    conflict.come_back(running.call, running.call.prior, lost)
