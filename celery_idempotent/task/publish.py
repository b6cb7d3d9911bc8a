"""Deduplicated publishing (``idempotency_dedupe_publish``): one message for each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.result import AsyncResult, EagerResult

from celery_idempotent.errors import IdempotencyError, KeyRuleError, StoreUnavailableError
from celery_idempotent.events import table
from celery_idempotent.events.report import About, ErrorT, report
from celery_idempotent.events.report import refuse as report_refused
from celery_idempotent.executor import conflict, replacement
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout, reservation
from celery_idempotent.settings import Settings
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from celery_idempotent.task import message_headers, shadow_message
from celery_idempotent.task.key_resolution import resolve_key
from celery_idempotent.task.requeue import hold_for
from celery_idempotent.task.reservation import is_stale
from celery_idempotent.task.result import RecordResult

if TYPE_CHECKING:
    from celery_idempotent.task.task import IdempotentTask

#: Options of a call that something else waits for. It is published even as a duplicate: the worker
#: replays the outcome and sends the continuation. The last task of a canvas, and the replacement of
#: a task, have a parent, and others wait for their id already.
_CANVAS_OPTIONS = (
    *("link", "link_error", "chain", "chord", "group_id"),
    *("parent_id", "replaced_task_nesting"),
)


def publish(
    task: IdempotentTask,
    args: Any,
    kwargs: Any,
    task_id: str,
    options: dict[str, Any],
    send: Callable[..., AsyncResult],
    *,
    has_own_id: bool,
) -> AsyncResult:
    """Sends the message.

    With ``idempotency_dedupe_publish`` the key is reserved first; if another call has it, nothing
    is sent and the result of that call is returned.

    Args:
        send: publishes the message with the options that it gets.
        has_own_id: whether the caller has chosen `task_id`. Others may wait for its result, so the
            message is sent even as a duplicate.

    Raises:
        KeyReusedError: if the key was used with other arguments.
        CorruptRecordError: if the record of the key cannot be read.
    """
    configuration = task.idempotency_configuration
    if not configuration.settings.deduplicates or any(map(options.get, _CANVAS_OPTIONS)):
        return send(**options)
    if configuration.in_shadow:
        marked = _marked(task, args, kwargs, task_id, options)
        return send(**(options if has_own_id else marked))
    try:
        key, headers = resolve_key(
            configuration, task_id, options.get("headers"), args or (), kwargs or {}
        )
    except KeyRuleError as error:
        refuse(task, task_id, "", error)
        raise
    if key is None or headers.key is not None:
        return send(**options)
    options = {
        **options,
        "headers": message_headers.with_derived_key(
            options.get("headers"), key, task_id, headers.root
        ),
    }
    store, settings = configuration.executor.store, configuration.settings
    try:
        reply = _reserve(task, key, task_id, args, kwargs, options)
    except StoreUnavailableError as error:
        # The worker begins under the same key, so a duplicate message does not run twice.
        report(table.NOT_RESERVED, About(task, task.name, task_id, key), error=error)
        return send(**options)
    if reply.case == "corrupt":
        raise refuse(task, task_id, key, layout.corrupt(str(key)))
    if reply.case == "reserved":
        result = None
        try:
            result = send(**options)
        finally:
            if result is None or isinstance(result, EagerResult):  # no message waits
                _delete_reservation(task, task_id, key)
        return result
    record = store.record(key, reply.raw)
    takes_turn = settings.until == "finished" or (settings.runs_again and has_own_id)
    if reply.case == "reused" and not takes_turn:
        raise refuse(task, task_id, key, conflict.reused(record))
    if has_own_id or reply.case in ("expired", "reused"):
        return send(**options)
    if settings.transaction is not None and layout.is_poisoned(record):
        return send(**options)  # the worker determines whether its row was committed
    about = About(task, task.name, task_id, key, _label(task, args, kwargs))
    report(table.DEDUPLICATED, about, record=record)
    record_key = _record_key(key, record.task_id, settings)
    return RecordResult(record.task_id, record_key, task.backend, task.app)


def _label(task: IdempotentTask, args: Any, kwargs: Any) -> str:
    label = task.idempotency_configuration.label
    return label.of(args or (), kwargs or {}) if label else ""


def _reserve(
    task: IdempotentTask, key: Key, task_id: str, args: Any, kwargs: Any, options: dict[str, Any]
) -> Reply:
    """Reserves `key` for a message with these options, after a message that has ended."""
    configuration = task.idempotency_configuration
    settings = configuration.settings
    hold = hold_for({"expires": task.expires, **options}, settings.reservation_ttl)
    reserve = commands.reserve(
        _record_key(key, task_id, settings),
        task_id,
        hold_ms=round(hold * 1000),
        label=_label(task, args, kwargs),
        waits=settings.until == "started",
    )
    reply = configuration.execute(reserve)
    if reply.case not in ("held", "reused", "finished"):
        return reply
    record = configuration.executor.store.record(key, reply.raw)
    reserved = reservation.read(record, reply.raw)
    if reserved and is_stale(task, reserved):
        _delete_reservation(task, reserved.task_id, key.with_fingerprint(record.fingerprint))
        return configuration.execute(reserve)
    error = None if settings.runs_again else replacement.error_of(record, settings)
    if error is None:
        return reply
    codec = configuration.executor.codec
    payload = run_sync(codec.encode_error(error, settings, key=str(key), token=record.token))
    configuration.execute(replacement.release(key, record, reply.raw, settings, payload))
    return configuration.execute(reserve)


def _record_key(key: Key, task_id: str, settings: Settings) -> Key:
    """Returns the key of the record that holds the outcome of `task_id`."""
    return key.of_message(task_id) if settings.runs_again else key


def refuse(task: IdempotentTask, task_id: str, key: str, error: ErrorT) -> ErrorT:
    """Reports that a call is not published, and returns `error`, which the caller raises."""
    about = About(task, task.name, task_id, key)
    return report_refused(about, error, table.PUBLISH_REFUSED, at="publish")


def _marked(
    task: IdempotentTask, args: Any, kwargs: Any, task_id: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options of a message in shadow, marked if it would not have been published."""
    configuration = task.idempotency_configuration
    try:
        key, parsed = resolve_key(
            configuration, task_id, options.get("headers"), args or (), kwargs or {}
        )
        if key is None or parsed.key is not None:
            return options
        reply = _reserve(task, key, task_id, args, kwargs, options)
        if reply.case not in ("held", "finished"):
            return options
        record = configuration.executor.store.record(key, reply.raw)
    except Exception as error:
        report(table.PUBLISHED_UNCOUNTED, About(task, task.name, task_id), error=error)
        return options
    about = About(task, task.name, task_id, key, _label(task, args, kwargs))
    report(table.PUBLISHED_IN_SHADOW, about, record=record)
    headers = shadow_message.mark(options.get("headers"), shadow_message.DEDUPLICATED, task_id)
    return {**options, "headers": headers}


def _delete_reservation(task: IdempotentTask, task_id: str, key: Key) -> None:
    configuration = task.idempotency_configuration
    try:
        record_key = _record_key(key, task_id, configuration.settings)
        configuration.execute(commands.reserve(record_key, task_id, hold_ms=0))
    except IdempotencyError as error:
        report(table.RESERVATION_KEPT, About(task, task.name, task_id, key), error=error)
