"""Publishing under ``idempotency_dedupe_publish``: one message for a key in flight or done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery.result import AsyncResult
from celery.states import REVOKED

from celery_idempotent.errors import IdempotencyError, StoreUnavailableError
from celery_idempotent.executor import conflict
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands
from celery_idempotent.task import message_headers
from celery_idempotent.task.key_resolution import resolve_key
from celery_idempotent.task.requeue import hold_for
from celery_idempotent.task.result import RecordResult

if TYPE_CHECKING:
    from celery_idempotent.task.task import IdempotentTask

logger = logging.getLogger(__name__)

#: A call with any of these has someone waiting behind it, and is published whatever runs already:
#: as a duplicate it is answered in the worker, and what follows it goes on from there. The last of
#: a canvas, and what takes a task's place, have a parent and an id that someone waits for already.
_CONTINUATIONS = (
    *("link", "link_error", "chain", "chord", "group_id"),
    *("parent_id", "replaced_task_nesting"),
)


def publish(
    task: IdempotentTask,
    args: Any,
    kwargs: Any,
    task_id: str,
    options: dict[str, Any],
    send: Callable[[dict[str, Any]], AsyncResult],
) -> AsyncResult:
    """Reserves the key and sends the message, or returns the result of the call that has the key.

    Args:
        send: publishes, given the options.

    Raises:
        KeyReusedError: the key belongs to a call with other arguments.
        CorruptRecordError: there is something under the key that cannot be read.
    """
    configured = task.idempotency_configuration
    if not configured.settings.dedupe_publish or any(map(options.get, _CONTINUATIONS)):
        return send(options)
    key, headers = resolve_key(task, task_id, options.get("headers"), args or (), kwargs or {})
    if key is None or headers.key is not None:
        return send(options)
    options = {
        **options,
        "headers": message_headers.with_derived_key(options.get("headers"), key, task_id),
    }
    store = configured.executor.store
    hold = hold_for({"expires": task.expires, **options}, configured.settings.lease)
    reserve = commands.reserve(key, task_id, hold_ms=round(hold * 1000))
    try:
        answer = store.execute(reserve)
        if answer.case in ("held", "reused"):
            record = store.record(key, answer.raw)
            if _is_revoked(task, record):
                _give_back(task, record.task_id, replace(key, fingerprint=record.fingerprint))
                answer = store.execute(reserve)
    except StoreUnavailableError as error:
        # The gate stands before the execution as well: at worst the message is one too many.
        logger.warning("%s is published without a reservation: %s", key, error)
        return send(options)
    if answer.case == "expired":
        return send(options)
    if answer.case == "corrupt":
        raise layout.corrupt(str(key))
    if answer.case == "reserved":
        try:
            return send(options)
        except BaseException:
            _give_back(task, task_id, key)
            raise
    record = store.record(key, answer.raw)
    if answer.case == "reused":
        raise conflict.reused(record)
    return RecordResult(record.task_id, key, task.backend, task.app)


def _is_revoked(task: IdempotentTask, record: Record) -> bool:
    """Whether the message that the key is kept for will be discarded by whoever receives it."""
    if record.state is not State.RESERVED:
        return False
    try:
        return bool(task.AsyncResult(record.task_id).state == REVOKED)
    except Exception as error:
        logger.debug("The result backend does not have the state of %s: %s", record.task_id, error)
        return False


def _give_back(task: IdempotentTask, task_id: str, key: Key) -> None:
    try:
        task.idempotency_configuration.executor.store.execute(
            commands.reserve(key, task_id, hold_ms=0)
        )
    except IdempotencyError as error:
        logger.warning("The reservation of %s is not given back; it ends by itself: %s", key, error)
