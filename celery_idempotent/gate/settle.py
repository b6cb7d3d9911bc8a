"""The end of an execution: its outcome is stored, its key given back, or it came too late."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from celery_idempotent import signals
from celery_idempotent.errors import CorruptRecordError, LeaseLostError, StoreUnavailableError
from celery_idempotent.gate import conflict
from celery_idempotent.gate.caller import Delegate, Fail, Release
from celery_idempotent.gate.replay import replay
from celery_idempotent.gate.running import Running
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.lease.interrupt import Interrupt
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.payload import DELEGATED, NOT_WANTED, Payload
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)


def with_result(running: Running, value: Any) -> Any:
    """Store `value` and return it; or return what a rival that came first has stored."""
    result = _payload(running, value)
    retention_ms = running.call.settings.result_ms
    answer = _store(
        running,
        commands.complete(running.call.key, running.execution.token, result, retention_ms),
    )
    if answer is None:
        return value
    if answer.case == "ok":
        running.call.own_outcome = True
        running.send(signals.completed)
        return value
    return _too_late(running, answer, lambda: value)


def with_error(running: Running, error: BaseException) -> Any:
    """Give the key back, or end it, as `error` demands; then raise it.

    Returns only where a rival came first and its result is the answer.
    """
    if running.interrupt is not None:
        _end(running.interrupt)
    if isinstance(error, LeaseLostError) and not running.lease.trusted:
        return _stopped(running, error)
    verdict = running.call.verdict(error)
    if isinstance(verdict, Fail):
        return _fail(running, error)
    if isinstance(verdict, Delegate):
        return _delegate(running, error)
    return _release(running, error, verdict)


def _end(interrupt: Interrupt) -> None:
    try:
        interrupt.over()
    except LeaseLostError:
        # It struck at the last moment; the work had ended by itself.
        interrupt.over()


def _payload(running: Running, value: Any) -> Payload:
    if not running.call.settings.store_result:
        return Payload("", NOT_WANTED)
    payload = running.payload(value)
    if not payload.kept:
        logger.error(
            "%s: the result of task %s is not kept: %s; duplicates will get ResultNotStoredError",
            running.execution.key,
            running.call.task_id,
            payload.body.decode(),
        )
    return payload


def _store(running: Running, outcome: Command) -> Reply | None:
    """Store the outcome; None if Redis stays away."""
    try:
        return running.persist(outcome)
    except StoreUnavailableError as error:
        logger.critical(
            "%s: the outcome of task %s is not stored: %s; a duplicate may run again",
            running.execution.key,
            running.call.task_id,
            error,
        )
        running.send(signals.outcome_unsaved, error=error)
        return None


def _delegate(running: Running, error: BaseException) -> Any:
    """Duplicates get the result of the task that has taken this one's place and id.

    That task has taken the continuation with it, so the note that it is out is due at once.
    """
    call = running.call
    result = Payload(DELEGATED, call.task_id.encode())
    answer = _store(
        running,
        commands.complete(call.key, running.execution.token, result, call.settings.result_ms),
    )
    if answer is not None and answer.case == "ok":
        with contextlib.suppress(StoreUnavailableError):
            running.persist(commands.dispatched(call.key, call.task_id))
        running.send(signals.completed)
    raise error


def _fail(running: Running, error: BaseException) -> Any:
    payload = running.payloads.of_error(error)
    retention_ms = running.call.settings.error_ms
    answer = _store(
        running,
        commands.fail(running.call.key, running.execution.token, payload, retention_ms),
    )
    if answer is not None and answer.case != "ok":
        return _too_late(running, answer, lambda: _raise(error))
    if answer is not None:
        running.call.own_outcome = True
        running.send(signals.failed, error=error)
    raise error


def _release(running: Running, error: BaseException, verdict: Release) -> Any:
    # First, so that the heartbeat does not find the key free and take it for a loss.
    heartbeat.let_go(running.lease)
    try:
        answer = running.release(verdict.hold)
    except (StoreUnavailableError, CorruptRecordError) as trouble:
        logger.warning(
            "%s: the key is not given back: %s; its lease ends by itself",
            running.execution.key,
            trouble,
        )
        raise error from error.__cause__
    if answer.case == "ok":
        running.send(signals.released, error=error, held_for=verdict.hold or None)
        raise error
    if verdict.hold or not isinstance(error, Exception):
        # The retry is on its way and will meet the rival; an exit is not to be argued with.
        running.tell_loss()
        raise error
    return _too_late(running, answer, lambda: _raise(error))


def _stopped(running: Running, error: LeaseLostError) -> Any:
    """The work stopped because the lease is lost: what a rival makes of it is the answer."""
    try:
        answer = running.release()
    except (StoreUnavailableError, CorruptRecordError):
        return _come_back(running)
    if answer.case == "ok":
        return _come_back(running)
    return _too_late(running, answer, lambda: _raise(error))


def _too_late(running: Running, answer: Reply, otherwise: Callable[[], Any]) -> Any:
    """The outcome was refused: the caller gets the winner's, now or when there is one."""
    running.tell_loss()
    record = _rival(running, answer)
    if record is None:
        # Forgotten by an operator, or by Redis. Nobody else has an answer.
        return otherwise()
    if record.state.finished:
        return replay(running.call, record)
    return _come_back(running)


def _rival(running: Running, answer: Reply) -> Record | None:
    try:
        return running.store.record(running.call.key, answer.raw) if answer.raw else None
    except CorruptRecordError:
        return None


def _come_back(running: Running) -> Any:
    lost = LeaseLostError(f"{running.execution.key}: another execution may run")
    conflict.come_back(running.call, running.call.prior, lost)


def _raise(error: BaseException) -> Any:
    raise error
