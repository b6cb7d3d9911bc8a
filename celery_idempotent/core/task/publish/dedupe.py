"""Deduplicated publishing (``idempotency_dedupe_publish``): one message for each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from celery import Task
from celery.result import AsyncResult, EagerResult
from celery.states import READY_STATES, REVOKED

from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import CallIdentity, report, report_refused
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.replay import replacement_error
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.core.store import commands
from celery_idempotent.core.task.message import message_headers
from celery_idempotent.core.task.message.eta import hold_for
from celery_idempotent.core.task.message.key_resolution import resolve_key
from celery_idempotent.core.task.message.message_headers import DEDUPLICATED
from celery_idempotent.core.task.publish.message_copy import with_derived_key
from celery_idempotent.core.task.publish.result import RecordResult
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    KeyRuleError,
    StoreUnavailableError,
)

#: Options of `apply_async` which show that something depends on the call: callbacks, or the rest of
#: a canvas. (The last task of a canvas, and the replacement of a task, have a parent, and others
#: already wait for their id.) Such a call is published even if it is a duplicate: its worker
#: replays the outcome, and sends the continuation.
_CANVAS_OPTIONS = frozenset({"link", "link_error", "chain", "chord", "group_id", "parent_id"})
#: Options of a message that continues a call under its key: a retry, or a replacement.
_CONTINUING = ("retries", "replaced_task_nesting")

#: Reports that a call is refused at publish; returns the error, which the caller raises.
report_publish_refused = partial(report_refused, event=table.PUBLISH_REFUSED, at="publish")


class PublishDecision(Enum):
    """What happens to a call that is published."""

    #: Its message is sent, and the key is not reserved for it.
    SEND = 1
    #: Its message is sent, and the key is reserved for it.
    RESERVED = 2
    #: It is not sent: the caller gets the result of the call that has the key, or ConflictError.
    DUPLICATE = 3
    #: It is refused: the key was used with other arguments.
    REUSED = 4


SEND, RESERVED, DUPLICATE, REUSED = PublishDecision


@dataclass
class Publication:
    """A call that is about to be published. An option of the task may change it."""

    task: Task
    args: Any
    kwargs: Any
    #: The options of `apply_async`.
    options: dict[str, Any]
    #: Whether callbacks or the rest of a canvas depend on the call.
    in_canvas: bool
    #: Whether its message is sent even if it is a duplicate.
    is_always_sent: bool
    #: Identifies the call in reports. `_reserve` adds the key and the label.
    identity: CallIdentity


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
    error, depending on the option. In shadow it always sends the message.

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
    in_canvas = any(map(options.get, _CANVAS_OPTIONS))
    identity = CallIdentity(task, task.name, task_id)
    publication = Publication(
        task, args or (), kwargs or {}, options, in_canvas, has_own_id or in_canvas, identity
    )
    decision, record = _decide(publication)
    args, kwargs, identity = publication.args, publication.kwargs, publication.identity
    if decision is DUPLICATE and configuration.in_shadow:
        report(table.PUBLISHED_IN_SHADOW, identity, record=record)
        headers = options.get("headers")
        options["headers"] = message_headers.with_finding(headers, DEDUPLICATED, task_id)
    elif decision is DUPLICATE:
        report(table.DEDUPLICATED, identity, record=record)
        if configuration.settings.publish_raises:
            text = f"{identity.key} is not published: task {record.task_id} has the key"
            raise conflict.error(text, record)
        record_key = configuration.record_key(identity.key, record.task_id)
        return RecordResult(record.task_id, record_key, task.backend, task.app)
    elif decision is REUSED and not configuration.in_shadow:
        difference = partial(configuration.rule.difference, args, kwargs, identity.key)
        raise report_publish_refused(identity, conflict.reused(record, difference))
    result = None
    try:
        result = send(args, kwargs, **options)
        return result
    finally:
        has_no_message = result is None or isinstance(result, EagerResult)
        if decision is RESERVED and has_no_message:
            _delete_reservation(identity)


def _decide(publication: Publication) -> tuple[PublishDecision, Any]:
    """Decides what happens to a call; if its key is free, reserves it.

    A message is sent without a reservation if it is unprotected or already carries its key, or if
    Redis does not reply: the worker begins it under the same key, so that no duplicate runs.

    Returns:
        The decision, and the record if another call has the key.

    Raises:
        KeyRuleError, TypeError: if no key can be derived.
        CorruptRecordError: if the record of the key cannot be read.
    """
    options, configuration = publication.options, publication.task.idempotency_configuration
    settings, in_shadow = configuration.settings, configuration.in_shadow
    in_canvas, is_sent = publication.in_canvas, publication.is_always_sent
    if any(map(options.get, _CONTINUING)):
        return SEND, None
    if in_canvas and (in_shadow or not settings.takes_newest):
        return SEND, None
    task_id, args, kwargs = publication.identity.task_id, publication.args, publication.kwargs
    try:
        key, carried = resolve_key(configuration, task_id, options.get("headers"), args, kwargs)
        if key is None or carried.key is not None:
            return SEND, None
        # A key without a fingerprint is made of all arguments, so those of a duplicate are not
        # newer but the same.
        takes_newest = settings.takes_newest and bool(key.fingerprint or settings.debounce)
        if in_canvas and not takes_newest:
            return SEND, None
        record = _reserve(publication, key, takes_newest=takes_newest)
    except Exception as error:
        if not (in_shadow or in_canvas or isinstance(error, StoreUnavailableError)):
            if isinstance(error, (KeyRuleError, CorruptRecordError)):
                report_publish_refused(publication.identity, error)
            raise
        event = table.PUBLISHED_UNCOUNTED if in_shadow else table.NOT_RESERVED
        report(event, publication.identity, error=error)
        return SEND, None
    if record is None:
        return RESERVED, None
    ours, others = key.fingerprint, record.fingerprint
    if ours and others and ours != others and not settings.takes_newest:
        # A message of a key that may run again can wait for its turn.
        may_wait = settings.runs_again and (is_sent or not settings.collapses)
        return (SEND if may_wait else REUSED), record
    if layout.is_poisoned(record):
        # An extension may know its outcome, which the worker then replays.
        is_sent = is_sent or any(each.knows_poisoned for each in settings.extensions)
    return (SEND if is_sent else DUPLICATE), record


def _reserve(publication: Publication, key: Key, *, takes_newest: bool) -> Record | None:
    """Reserves `key` for the message, even if it is reserved for a message that has ended.

    Args:
        takes_newest: whether a message that waits runs with the arguments of this one.

    Returns:
        None if it is reserved; else the record of the call that has the key.

    Raises:
        StoreUnavailableError: if Redis does not reply.
        CorruptRecordError: if the record of the key cannot be read.
        Exception: if the arguments cannot be serialized.
    """
    task, options, task_id = publication.task, publication.options, publication.identity.task_id
    configuration: TaskConfiguration = task.idempotency_configuration
    settings = configuration.settings
    tail = configuration.tail_of(publication.args, publication.kwargs)
    publication.identity = identity = publication.identity._replace(key=key, label=tail.label)
    newest: dict[str, Any] = {}
    if not configuration.in_shadow:
        options["headers"] = with_derived_key(options.get("headers"), key, task_id)
        for option in settings.option_classes if takes_newest else ():
            newest |= option.reserving(settings, publication)
    hold_ms = round(hold_for({"expires": task.expires, **options}, settings.reservation_ttl) * 1000)
    record_key, collapses = configuration.record_key(key, task_id), settings.collapses
    command = commands.reserve(
        record_key, task_id, hold_ms, tail=tail, after_running=collapses, **newest
    )

    def holder() -> Record | None:
        reply = configuration.execute(command)
        reserved = reply.case == "reserved"
        return None if reserved else configuration.executor.store.record(key, reply.raw)

    record = holder()
    return holder() if record is not None and _free_key(identity, record) else record


def _free_key(identity: CallIdentity, record: Record) -> bool:
    """Frees the key of a call that has ended without an outcome; returns whether it did.

    Its replacement has failed; or its message has ended unrun, and the worker has not given the
    reservation back yet.
    """
    configuration: TaskConfiguration = identity.sender.idempotency_configuration
    settings = configuration.settings
    if record.state is State.RESERVED and _has_ended(identity, record):
        key = configuration.record_key(identity.key, record.task_id)
        command = commands.give_back(key, record.task_id)
        if record.awaited:  # its retry is reserved in the record, and not in the slot
            command = commands.forget(key, record)
    elif settings.runs_again or replacement_error(record, settings) is None:
        return False
    else:
        command = commands.release(identity.key, record.token, retention_ms=0)
    configuration.execute(command)
    return True


def _has_ended(identity: CallIdentity, record: Record) -> bool:
    """Returns whether the result backend shows that the message of a reservation has ended.

    A retry may still be pending if Celery has stored an outcome, namely that of a body that has
    called ``self.retry(throw=False)``. Only a revoked retry has ended.
    """
    try:
        state = identity.sender.AsyncResult(record.task_id).state
    except Exception as error:
        report(table.RESULT_UNREADABLE, identity._replace(task_id=record.task_id), error=error)
        return False
    return state == REVOKED or (state in READY_STATES and not record.awaited)


def _delete_reservation(identity: CallIdentity) -> None:
    """Deletes the reservation of a call that ran eagerly, or whose publish has failed."""
    configuration: TaskConfiguration = identity.sender.idempotency_configuration
    key = configuration.record_key(identity.key, identity.task_id)
    try:
        configuration.execute(commands.give_back(key, identity.task_id))
    except IdempotencyError as error:
        report(table.RESERVATION_KEPT, identity, error=error)
