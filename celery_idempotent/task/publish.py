"""Deduplicated publishing (``idempotency_dedupe_publish``): one message for each key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Task
from celery.result import AsyncResult, EagerResult
from celery.states import READY_STATES, REVOKED

from celery_idempotent.configuration.configuration import TaskConfiguration
from celery_idempotent.errors import IdempotencyError, KeyRuleError, StoreUnavailableError
from celery_idempotent.events import table
from celery_idempotent.events.report import About, log_extra, refuse, report
from celery_idempotent.flow import conflict, replacement
from celery_idempotent.printable import one_line
from celery_idempotent.record import layout, reservation
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply
from celery_idempotent.task import message_headers
from celery_idempotent.task.key_resolution import resolve_key
from celery_idempotent.task.message_headers import DEDUPLICATED
from celery_idempotent.task.republish import hold_for
from celery_idempotent.task.result import RecordResult

logger = logging.getLogger(__name__)

#: Options of a call that something else waits for. It is published even as a duplicate: the worker
#: replays the outcome and sends the continuation. The last task of a canvas, and the replacement of
#: a task, have a parent, and others wait for their id already.
_CANVAS_OPTIONS = frozenset(
    {"link", "link_error", "chain", "chord", "group_id", "parent_id", "replaced_task_nesting"}
)

#: Reports that a call is not published, and returns the error, which the caller raises.
refuse_publish = partial(refuse, event=table.PUBLISH_REFUSED, at="publish")


def publish(
    task: Task,
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
    is sent, and the result of that call is returned or, by the option, an error raised.

    Args:
        options: of the call; its headers are replaced.
        send: publishes the message with the options that it gets.
        has_own_id: whether the caller has chosen `task_id`. Others may wait for its result, so the
            message is sent even as a duplicate.

    Raises:
        KeyReusedError: if the key was used with other arguments.
        ConflictError: if another call has the key, and ``idempotency_dedupe_publish`` is "raise".
        CorruptRecordError: if the record of the key cannot be read.
    """
    configuration = task.idempotency_configuration
    settings = configuration.settings
    if not settings.deduplicates or any(map(options.get, _CANVAS_OPTIONS)):
        return send(**options)
    about, headers = About(task, task.name, task_id), options.get("headers")
    identify = partial(_identify, about, args or (), kwargs or {}, headers)
    if configuration.in_shadow:
        if _is_duplicate_in_shadow(about, identify, options) and not has_own_id:
            options["headers"] = message_headers.with_finding(headers, DEDUPLICATED, task_id)
        return send(**options)
    try:
        about, root = identify()
    except KeyRuleError as error:
        refuse_publish(about, error)
        raise
    if root is None:
        return send(**options)
    key = about.key
    options["headers"] = message_headers.with_derived_key(headers, key, task_id, root)
    try:
        reply = _reserve(about, options)
    except StoreUnavailableError as error:
        # The worker begins under the same key, so a duplicate message does not run twice.
        report(table.NOT_RESERVED, about, error=error)
        return send(**options)
    if reply.case == "corrupt":
        raise refuse_publish(about, layout.corrupt(str(key)))
    if reply.case == "reserved":
        result = None
        try:
            result = send(**options)
        finally:
            if result is None or isinstance(result, EagerResult):  # no message waits
                _delete_reservation(about)
        return result
    record = configuration.executor.store.record(key, reply.raw)
    takes_turn = settings.until == "finished" or (settings.runs_again and has_own_id)
    if reply.case == "reused" and not takes_turn:
        difference = partial(configuration.rule.difference, args or (), kwargs or {}, key)
        raise refuse_publish(about, conflict.reused(record, difference))
    if has_own_id or reply.case in ("expired", "reused"):
        return send(**options)
    if settings.transaction is not None and layout.is_poisoned(record):
        return send(**options)  # the worker determines whether its row was committed
    report(table.DEDUPLICATED, about, record=record)
    if settings.dedupe_publish == "raise":
        raise conflict.error(f"{key} is not published: task {record.task_id} has the key", record)
    record_key = configuration.record_key(key, record.task_id)
    return RecordResult(record.task_id, record_key, task.backend, task.app)


def _identify(
    about: About, args: Any, kwargs: Any, headers: Mapping[str, Any] | None
) -> tuple[About, bytes | None]:
    """Returns the call with its key, and its root; None if it is not deduplicated."""
    configuration: TaskConfiguration = about.sender.idempotency_configuration
    key, parsed = resolve_key(configuration, about.task_id, headers, args, kwargs)
    if key is None or parsed.key is not None:
        return about, None
    label = configuration.label.of(args, kwargs) if configuration.label else ""
    return about._replace(key=key, label=label), parsed.root


def _is_duplicate_in_shadow(
    about: About, identify: Callable[[], tuple[About, bytes | None]], options: Mapping[str, Any]
) -> bool:
    """Reserves the key in shadow; returns whether the call would not have been published."""
    try:
        identified, root = identify()
        if root is None:
            return False
        reply = _reserve(identified, options)
        if reply.case not in ("held", "finished"):
            return False
        store = about.sender.idempotency_configuration.executor.store
        record = store.record(identified.key, reply.raw)
    except Exception as error:
        report(table.PUBLISHED_UNCOUNTED, about, error=error)
        return False
    report(table.PUBLISHED_IN_SHADOW, identified, record=record)
    return True


def _reserve(about: About, options: Mapping[str, Any]) -> Reply:
    """Reserves the key for the message, after a message that has ended."""
    task, key = about.sender, about.key
    configuration: TaskConfiguration = task.idempotency_configuration
    settings, executor = configuration.settings, configuration.executor
    hold = hold_for({"expires": task.expires, **options}, settings.reservation_ttl)
    reserve = commands.reserve(
        configuration.record_key(key, about.task_id),
        about.task_id,
        hold_ms=round(hold * 1000),
        label=about.label,
        waits=settings.until == "started",
    )
    reply = configuration.execute(reserve)
    if reply.case not in ("held", "reused", "finished"):
        return reply
    record = executor.store.record(key, reply.raw)
    reserved = reservation.read(record, reply.raw)
    if reserved and is_stale(task, reserved):
        key = key.with_fingerprint(record.fingerprint)
        _delete_reservation(about._replace(key=key, task_id=reserved.task_id))
        return configuration.execute(reserve)
    error = None if settings.runs_again else replacement.error_of(record, settings)
    if error is None:
        return reply
    release = replacement.release(key, record, reply.raw, settings, executor.codec, error)
    configuration.execute(run_sync(release))
    return configuration.execute(reserve)


def _delete_reservation(about: About) -> None:
    """Deletes the reservation of `about`, which may be an earlier message."""
    try:
        about.sender.idempotency_configuration.delete_reservation(about.key, about.task_id)
    except IdempotencyError as error:
        report(table.RESERVATION_KEPT, about, error=error)


def is_stale(task: Task, reservation: Reservation) -> bool:
    """Returns whether the result backend has the message of a reservation as ended.

    It was revoked, no worker could run it, or it ran while Redis was unavailable. A retry may be
    pending although Celery has stored an outcome, that of a body which called
    ``self.retry(throw=False)``: only a revoked one has ended.
    """
    try:
        state = task.AsyncResult(reservation.task_id).state
    except Exception as error:
        task_id, extra = reservation.task_id, log_extra(None, task_id=reservation.task_id)
        logger.debug("Cannot read the state of task %s: %s", one_line(task_id), error, extra=extra)
        return False
    return state == REVOKED or (state in READY_STATES and reservation.retry is None)
