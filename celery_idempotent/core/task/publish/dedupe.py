"""Deduplicated publishing (``idempotency_dedupe_publish``): one message for each key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from celery import Task
from celery.result import AsyncResult, EagerResult
from celery.states import READY_STATES, REVOKED

from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import About, log_extra, report, report_refused
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.replay import replacement_error
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.core.store import commands
from celery_idempotent.core.task.message import message_headers
from celery_idempotent.core.task.message.key_resolution import resolve_key
from celery_idempotent.core.task.message.message_headers import DEDUPLICATED
from celery_idempotent.core.task.publish.put_back import hold_for, seconds_until, with_derived_key
from celery_idempotent.core.task.publish.result import RecordResult
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    KeyRuleError,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)

#: Options which show that something depends on the call. Even a duplicate with one is published:
#: the worker replays the outcome and sends the continuation. The last task of a canvas and the
#: replacement of a task have a parent, and others already wait for their id.
_CANVAS_OPTIONS = frozenset({"link", "link_error", "chain", "chord", "group_id", "parent_id"})
#: Options of messages that continue a call, and have its key.
_CONTINUING = ("retries", "replaced_task_nesting")

#: Reports that a call is refused at publish; returns the error, which the caller raises.
report_publish_refused = partial(report_refused, event=table.PUBLISH_REFUSED, at="publish")


class Publication(NamedTuple):
    """A call that is about to be published with a reservation."""

    key: Key
    codec: PayloadCodec
    arguments: tuple[Any, Any]
    #: Of the message.
    serializer: str
    #: Of `apply_async`; may be changed.
    options: dict[str, Any]
    #: Until its countdown or ETA.
    seconds: float
    #: Whether the message is sent in any case.
    is_sent: bool


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
    """Reserves the key, and sends the message.

    If another call has the key, it sends nothing, and returns the result of that call or raises an
    error, depending on the option.

    Args:
        options: of the call; the headers in it are replaced.
        send: publishes the message with arguments and options.
        has_own_id: whether the caller has chosen `task_id`. Others may wait for its result, so the
            message is sent even if it is a duplicate.

    Raises:
        KeyReusedError: if the key was used with other arguments.
        ConflictError: if another call has the key, and the option is "raise".
        CorruptRecordError: if the record of the key cannot be read.
    """
    configuration = task.idempotency_configuration
    settings, in_shadow = configuration.settings, configuration.in_shadow
    takes_newest = settings.takes_newest
    is_continued = any(map(options.get, _CANVAS_OPTIONS))
    if any(map(options.get, _CONTINUING)):
        return send(args, kwargs, **options)
    if is_continued and (in_shadow or not takes_newest):
        return send(args, kwargs, **options)
    is_sent = has_own_id or is_continued
    args, kwargs, headers = args or (), kwargs or {}, options.get("headers")
    about, case, record = About(task, task.name, task_id), "", None
    try:
        key, carried = resolve_key(configuration, task_id, headers, args, kwargs)
        if key is None or not (key.fingerprint or settings.debounce):
            takes_newest = False
        is_new = key is not None and carried.key is None  # else unprotected, or published again
        if key is not None and is_new and (takes_newest or not is_continued):
            more: dict[str, Any] = {"tail": configuration.tail_of(args, kwargs)}
            about = about._replace(key=key, label=more["tail"].label)
            if not in_shadow:
                options["headers"] = with_derived_key(headers, key, task_id)
            if takes_newest and not in_shadow:
                serializer = options.get("serializer") or task.serializer
                if serializer == "pickle":
                    args = [*args]  # a tuple cannot be replaced in the worker
                seconds = seconds_until(options.get("eta") or options.get("countdown"))
                codec = configuration.executor.codec
                publication = Publication(
                    key, codec, (args, kwargs), serializer, options, seconds, is_sent
                )
                for option in settings.options:
                    more |= option.reserving(settings, publication)
            case, record = _reserve(about, options, more)
            if case == "reused" and takes_newest:
                case = "held"
    except Exception as error:
        if in_shadow:
            report(table.PUBLISHED_UNCOUNTED, about, error=error)
        elif isinstance(error, StoreUnavailableError) or is_continued:
            # The worker begins under the same key, so a duplicate message does not run twice.
            report(table.NOT_RESERVED, about, error=error)
        else:
            if isinstance(error, (KeyRuleError, CorruptRecordError)):
                report_publish_refused(about, error)
            raise
    if case == "reserved":
        result = None
        try:
            result = send(args, kwargs, **options)
        finally:
            if result is None or isinstance(result, EagerResult):  # no message waits
                _delete_reservation(about)
        return result
    if in_shadow and record is not None and case != "reused":
        report(table.PUBLISHED_IN_SHADOW, about, record=record)
        if not has_own_id:
            options["headers"] = message_headers.with_finding(headers, DEDUPLICATED, task_id)
    if in_shadow or record is None:
        return send(args, kwargs, **options)
    takes_turn = settings.runs_again and (is_sent or not settings.collapses)
    if case == "reused" and not takes_turn:
        difference = partial(configuration.rule.difference, args, kwargs, about.key)
        raise report_publish_refused(about, conflict.reused(record, difference))
    if is_sent or case == "reused":
        return send(args, kwargs, **options)
    if layout.is_poisoned(record) and any(e.knows_poisoned for e in settings.extensions):
        return send(args, kwargs, **options)
    report(table.DEDUPLICATED, about, record=record)
    if settings.publish_raises:
        raise conflict.error(
            f"{about.key} is not published: task {record.task_id} has the key", record
        )
    record_key = configuration.record_key(about.key, record.task_id)
    return RecordResult(record.task_id, record_key, task.backend, task.app)


def _reserve(
    about: About, options: Mapping[str, Any], more: Mapping[str, Any]
) -> tuple[str, Record | None]:
    """Reserves the key for the message, even if it is reserved for a message that has ended.

    Args:
        more: options of `commands.reserve`.

    Returns:
        The case of the reply, and the record if another call has the key.

    Raises:
        StoreUnavailableError: if Redis does not reply.
        CorruptRecordError: if the record of the key cannot be read.
    """
    configuration: TaskConfiguration = about.sender.idempotency_configuration
    settings = configuration.settings
    hold = hold_for({"expires": about.sender.expires, **options}, settings.reservation_ttl)
    reserve = commands.reserve(
        configuration.record_key(about.key, about.task_id),
        about.task_id,
        hold_ms=round(hold * 1000),
        after_running=settings.collapses,
        **more,
    )
    for may_free in (True, False):
        reply = configuration.execute(reserve)
        if reply.case == "reserved":
            break
        record = configuration.executor.store.record(about.key, reply.raw)
        if not (may_free and _free_key(about, record)):
            ours, others = about.key.fingerprint, record.fingerprint
            return "reused" if ours and others and ours != others else reply.case, record
    return reply.case, None


def _free_key(about: About, record: Record) -> bool:
    """Frees the key of a call that has ended without an outcome; returns whether it did.

    Its replacement has failed; or its message has ended unrun, and the worker has not given the
    reservation back yet.
    """
    configuration: TaskConfiguration = about.sender.idempotency_configuration
    settings = configuration.settings
    if record.state is State.RESERVED and _has_ended(about.sender, record):
        # A retry is reserved in the record, a published message in the slot.
        key = configuration.record_key(about.key, record.task_id)
        free = (
            commands.forget(key, record)
            if record.awaited
            else commands.give_back(key, record.task_id)
        )
    elif settings.runs_again or replacement_error(record, settings) is None:
        return False
    else:
        free = commands.release(about.key, record.token, retention_ms=0)
    configuration.execute(free)
    return True


def _has_ended(task: Task, record: Record) -> bool:
    """Returns whether the result backend shows that the message of a reservation has ended.

    A retry may still be pending if Celery has stored an outcome, namely that of a body that has
    called ``self.retry(throw=False)``. Only a revoked retry has ended.
    """
    try:
        state = task.AsyncResult(record.task_id).state
    except Exception as error:
        task_id, extra = record.task_id, log_extra(None, task_id=record.task_id)
        logger.debug("Cannot read the state of task %s: %s", one_line(task_id), error, extra=extra)
        return False
    return state == REVOKED or (state in READY_STATES and not record.awaited)


def _delete_reservation(about: About) -> None:
    """Deletes the reservation of the message `about`."""
    configuration: TaskConfiguration = about.sender.idempotency_configuration
    key = configuration.record_key(about.key, about.task_id)
    try:
        configuration.execute(commands.give_back(key, about.task_id))
    except IdempotencyError as error:
        report(table.RESERVATION_KEPT, about, error=error)
