"""The decision about a call. Each pass has exactly one, the first: it is counted here.

A process that dies before it leaves none. :data:`celery_idempotent.signals.DECISIONS` describes
them.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from celery_idempotent import signals
from celery_idempotent.call_log import log_call
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    KeyReusedError,
    KeyRuleError,
    PoisonedTaskError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.record.record import Record

logger = logging.getLogger(__name__)

ErrorT = TypeVar("ErrorT", bound=Exception)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (KeyRuleError, "key_rule"),
    (KeyReusedError, "reused"),
    (PoisonedTaskError, "poisoned"),
    (CorruptRecordError, "corrupt"),
    (ResultNotStoredError, "not_stored"),
    (StoreUnavailableError, "store_unavailable"),
    (Exception, "invalid"),
)


def decide(call: ExecutorCall, decision: str) -> None:
    """Counts `decision`, unless the call has one already."""
    if not call.decision:
        call.decision = decision
        signals.count(decision, call.key.task)


def send(signal: Any, call: ExecutorCall, **details: Any) -> None:
    """Sends `signal` with the arguments that all signals about a call have."""
    signals.send(
        signal,
        call.sender,
        task_id=call.task_id,
        key=str(call.key),
        label=call.label,
        **details,
    )


def refuse(call: ExecutorCall, error: ErrorT) -> ErrorT:
    """Reports that `call` is refused, and returns `error`, which the caller raises."""
    decide(call, "refused")
    report_refusal(
        call.sender, call.key.task, call.task_id, call.key, error, at="begin", label=call.label
    )
    return error


def decide_by(call: ExecutorCall, error: BaseException) -> None:
    """Counts the decision of a call that `error` has ended before there was another one."""
    if not call.decision:
        if isinstance(error, IdempotencyError):
            refuse(call, error)
        else:
            decide(call, "interrupted")


def refuse_without_key(sender: Any, task: str, task_id: str, error: Exception) -> None:
    """Reports that a call is refused for which no key can be derived."""
    signals.count("refused", task)
    report_refusal(sender, task, task_id, "", error, at="begin")


def report_refusal(
    sender: Any,
    task: str,
    task_id: str,
    key: str,
    error: Exception,
    *,
    at: str,
    label: str = "",
) -> None:
    """Logs, counts and signals that a call is refused; not its decision.

    The line is a warning: the caller that the error is raised to logs it as an error. Celery does,
    with its traceback.

    Args:
        task: its name.
        key: empty if none can be derived.
        at: ``begin`` or ``publish``.
    """
    reason = reason_of(error)
    log_call(
        logger,
        logging.WARNING,
        "is refused (%s): %s",
        reason,
        without_key(key, error),
        key=key,
        task=task,
        task_id=task_id,
        label=label,
        decision="refused" if at == "begin" else "",
    )
    signals.count(signals.REFUSED + reason, task)
    signals.send(
        signals.refused,
        sender,
        task_id=task_id,
        key=str(key),
        label=label,
        reason=reason,
        error=error,
        at=at,
    )


def reason_of(error: Exception) -> str:
    """The one of `signals.REASONS` for which a call with `error` is refused."""
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))


def log(
    logger: logging.Logger,
    level: int,
    call: ExecutorCall,
    message: str,
    *args: Any,
    execution: BaseExecution | None = None,
    exc_info: bool = False,
) -> None:
    """Logs that `call` … `message`.

    Args:
        execution: the execution that the call has begun.
        exc_info: whether to log the traceback of the current exception.
    """
    log_call(
        logger,
        level,
        message,
        *args,
        key=call.key,
        task_id=call.task_id,
        label=call.label,
        decision=call.decision,
        token=execution.token if execution else 0,
        attempt=execution.attempt if execution else 0,
        exc_info=exc_info,
    )


def without_key(key: str, error: BaseException) -> str:
    """Returns the text of `error`, with "the key" for `key`, which begins the line."""
    text = str(error) if isinstance(error, IdempotencyError) else repr(error)
    return text.replace(key, "the key") if key else text


def replayed(call: ExecutorCall, record: Record) -> None:
    """Reports that `call` gets the outcome of `record`."""
    decide(call, "replay")
    log(logger, logging.INFO, call, "gets the outcome of task %s", record.task_id)
    signals.send(
        signals.replayed,
        call.sender,
        task_id=call.task_id,
        key=record.key,
        label=call.label,
        record=record,
    )


def conflicted(call: ExecutorCall, record: Record, policy: str) -> None:
    """Reports that another call holds the key, and which policy applies to `call`."""
    decide(call, "conflict")
    send(signals.conflicted, call, record=record, policy=policy)
