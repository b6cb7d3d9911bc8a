"""Forgets records and runs ended calls again, if nothing has changed since a person saw them.

Both are logged with the name of that person.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from celery.canvas import Signature

from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import CallIdentity, log_extra, report
from celery_idempotent.core.flow.forget import delete_message, forget_call
from celery_idempotent.core.key import Key, text_digest
from celery_idempotent.core.payload.value_codec import DATA_ONLY, dump
from celery_idempotent.core.printable import one_line, printable
from celery_idempotent.core.record import State
from celery_idempotent.core.store.commands import NO_RECORD, UNREADABLE
from celery_idempotent.core.store.server_info import location
from celery_idempotent.core.task.publish import kept_message, put_back
from celery_idempotent.core.task.publish.kept_message import Part
from celery_idempotent.errors import CorruptRecordError, StoreUnavailableError
from celery_idempotent.operations.calls.lookup import Target
from celery_idempotent.operations.records.query import read_view
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.sql import database_of
from celery_idempotent.sql.database import Database

logger = logging.getLogger(__name__)

#: What became of a record that a user wanted to forget; lua/forget.lua has the last three replies.
FORGOTTEN, RUNNING, CHANGED, ABSENT = "forgotten", "running", "changed", "absent"
#: What became of a call that a user wanted to run again, besides CHANGED.
PUBLISHED, NOT_ENDED, NO_MESSAGE = "published", "not ended", "no message"

MESSAGES = {
    FORGOTTEN: "forgotten",
    PUBLISHED: "published: it runs again",
    RUNNING: "kept: it is running, and its lease has not expired",
    CHANGED: "kept: it has changed since it was shown",
    ABSENT: "already absent",
    NOT_ENDED: "kept: it has not ended, or belongs to no task of this app",
    NO_MESSAGE: "not run: its message is not kept; forget the key, then publish the call again",
}

#: The namespace of the new task ids (``uuid5``) under which completed calls run again.
_NAMESPACE = UUID("0b6f4bd0-6a6c-4bb2-9f0e-5f8b3a0f5a5e")


def forget(
    target: Target,
    tasks: Sequence[IdempotentTaskLike],
    *,
    user: str,
    force: bool = False,
    database: Database | None = None,
) -> str:
    """Deletes a record and its row, logs it, and sends the signal ``forgotten``.

    The record and row must still be those of `target`; if `target` has no row, any row is deleted.

    Args:
        tasks: all idempotent tasks of the app.
        user: who requests it.
        force: also forget a running call, without stopping its execution.
        database: the one with the row, for the key of a function.

    Returns:
        FORGOTTEN, RUNNING, CHANGED or ABSENT.

    Raises:
        StoreUnavailableError: if Redis or the database is unavailable.
    """
    key, view, outcome, _ = target
    if view is not None:
        store = view.store
    elif outcome is not None:
        store = outcome.task.idempotency_configuration.executor.store
    else:
        return ABSENT
    stores = {task: task.idempotency_configuration.executor.store for task in tasks}
    here = location(store)
    owners = [task for task in tasks if location(stores[task]) == here]
    sender = next((task for task in owners if task.name == key.task), None)
    configuration = (sender or owners[0]).idempotency_configuration
    record = view.record if view else None
    shown = NO_RECORD if view is None else record or UNREADABLE
    forget_record = partial(forget_call, configuration.executor, key, shown, force=force)
    if sender:
        database = database_of(sender) or database
    if database is None:
        case = forget_record()
    else:
        owner = outcome.row.owner if outcome else ""
        case = database.forget(store.config.prefix, key, forget_record, owner)
    if case != "ok":
        return case
    found = outcome.row if outcome and view is None else record
    state = "unreadable" if found is None else str(found.state)
    label = record.label if record else ""
    call = CallIdentity(sender, key.task, found.task_id if found else "", key, label)
    state += "" if view else ", in the database alone"
    report(table.FORGOTTEN, call, found, user=user, state=state)
    return FORGOTTEN


class EndedCall(NamedTuple):
    """A call that may run again."""

    key: Key
    task: Any
    #: Task id of the outcome, or of a rejected duplicate.
    task_id: str
    #: State of the outcome; None for a rejected duplicate, which has none.
    state: State | None
    #: Token of the outcome; 0 for a rejected duplicate.
    token: int
    #: The record; None if there is only a row in the user's database.
    view: RecordView | None
    #: What running it again publishes; None if that is unknown.
    message: Signature | None
    #: Whether `message` is the kept one; else its arguments come from the result backend.
    is_kept: bool = True

    @property
    def parts(self) -> list[Part]:
        """What running it again publishes: the call, then its continuation."""
        return [] if self.message is None else [*kept_message.parts(self.message)]

    @property
    def message_id(self) -> str:
        """The task id under which it runs again."""
        return "" if self.message is None else str(self.message.options["task_id"])

    @property
    def version(self) -> str:
        """Identifies the outcome and the message: a confirmation applies to this version only."""
        published = dump(self.message and dict(self.message), "json").body
        return f"{self.state}-{self.token}-{text_digest(published)}"

    @property
    def summary(self) -> str:
        """What running it again publishes, without arguments; empty without a message."""
        published = ", ".join(dict.fromkeys(map(str, self.parts)))
        source = "" if self.is_kept else ", with arguments from the result backend"
        return published and f"as task {self.message_id}{source}: {published}"

    @property
    def has_completed(self) -> bool:
        """Whether it completed, so that running it again repeats its effect."""
        return self.state is State.COMPLETED


def find_ended(tasks: Sequence[IdempotentTaskLike], target: Target) -> EndedCall | None:
    """Returns the call with its message; None if it has no task or has not ended.

    Raises:
        IdempotencyError: if the message cannot be used, or Redis is unavailable.
    """
    key, view, outcome, duplicate = target
    task: Any = next((task for task in tasks if task.name == key.task), None)
    if task is None:
        return None
    configuration = task.idempotency_configuration
    if duplicate:
        message = kept_message.find(task, key, duplicate)
        if message is not None:
            return EndedCall(key, task, duplicate, None, 0, view, message)
    if view is not None and configuration.settings.runs_again and view.record is not None:
        # The record of the key may be that of another call by now. This call has its own record,
        # under the key of its message.
        own_key = key.of_message(view.record.task_id)
        view = read_view(view.store, own_key) or view
    found: Any = outcome.row if view is None and outcome is not None else view and view.record
    if found is None or not State(found.state).finished:
        return None
    state = State(found.state)
    message = kept_message.find(task, key, found.task_id)
    is_kept = message is not None
    if message is None:
        message = _from_result_backend(task, key, found.task_id, state, found.token)
    return EndedCall(key, task, found.task_id, state, found.token, view, message, is_kept)


def _from_result_backend(
    task: Any, key: Key, task_id: str, state: State, token: int
) -> Signature | None:
    """Returns a message with the arguments that ``result_extended`` stored, if any.

    A completed call gets a new task id, since a result backend does not overwrite a success.
    Nothing is read from a backend whose serializer may execute code.
    """
    result = task.AsyncResult(task_id)
    try:
        if task.backend.content_type not in DATA_ONLY:
            return None
        name, args, kwargs, queue = result.name, result.args, result.kwargs, result.queue
    except Exception as error:
        extra = log_extra(str(key), task_id=task_id)
        reason = type(error).__name__
        logger.debug("Cannot read the arguments of task %s: %s", task_id, reason, extra=extra)
        return None
    if name != task.name or not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        return None
    if state is State.COMPLETED:
        task_id = str(uuid5(_NAMESPACE, f"{key}:{token}"))
    options = {"queue": queue} if queue in [*task.app.amqp.queues] else {}
    message: Signature = task.signature(args, kwargs).set(task_id=task_id, **options)
    return message


def rerun(call: EndedCall | None, *, user: str) -> str:
    """Publishes the message of `call`, logs it, and sends the signal ``rerun``.

    The record stays until a worker receives the message; the worker forgets the outcome if it is
    still that of `call`. Two users who rerun a call at once run it once.

    Args:
        call: None if not ended.
        user: who requests it.

    Returns:
        PUBLISHED, NOT_ENDED, CHANGED or NO_MESSAGE.

    Raises:
        StoreUnavailableError: if Redis or the broker is unavailable.
        CorruptRecordError: if the message can never be published.
    """
    if call is None:
        return NOT_ENDED
    if call.message is None:
        return NO_MESSAGE
    if call.state is not None and call.view is not None:
        current = read_view(call.view.store, call.view.key)
        if current is None or current.version != call.view.version:
            return CHANGED
    record = call.view.record if call.view is not None else None
    what = one_line(f"{call.state or 'rejected'}, {call.summary}")
    try:
        key = call.key.with_fingerprint(record.fingerprint if record else b"")
        task_id = kept_message.publish(call.message, key, call.token)
    except put_back.broker_errors(call.task.app) as error:
        raise StoreUnavailableError(
            f"{call.key}: its message cannot be published: {type(error).__name__}; try "
            "again: the call cannot run twice"
        ) from error
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise CorruptRecordError(
            f"{call.key}: its message cannot be published: {reason}"
        ) from error
    if call.state is None:
        executor = call.task.idempotency_configuration.executor
        delete_message(executor, call.key, call.task_id)
    label = record.label if record else ""
    published = CallIdentity(call.task, call.key.task, task_id, call.key, label)
    report(table.RERUN, published, user=user, what=what)
    return PUBLISHED
