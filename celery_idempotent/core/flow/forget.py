"""Forgets a call: deletes its record, the message that is kept for it, and its offloaded values.

Tasks, the command line and reruns use it.
"""

from __future__ import annotations

import contextlib
from functools import partial

from celery_idempotent.core.flow.thread import Executor
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.value_codec import MAX_DECODED
from celery_idempotent.core.record import Payload, Record, State, message_field
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.errors import ConflictError, CorruptRecordError
from celery_idempotent.settings import Settings

#: Maximum bytes of the name of an object.
_MAX_NAME = 4096


def forget(executor: Executor, settings: Settings, key: Key, *, force: bool) -> bool:
    """Forgets a call, wherever its options have stored the outcome; returns whether there was one.

    Args:
        force: also while an execution runs.

    Raises:
        ConflictError: if the call is running, or its record has changed meanwhile.
        StoreUnavailableError: if Redis or the database is unavailable.
    """
    shown = None if force else _record_to_forget(executor, key)
    forget_record = partial(forget_call, executor, key, shown, force=force)
    for extension in settings.extensions:
        forget_record = partial(extension.forget, settings, key, forget_record)
    case = forget_record()
    if case == "running":
        task_id = shown.task_id if isinstance(shown, Record) else "?"
        raise ConflictError(
            f"{key} is running as task {task_id}; pass force=True to forget it, so that another "
            "execution can begin beside it",
            task_id,
        )
    if case == "changed":
        raise ConflictError(f"{key} has changed since it was read, and is kept; try again")
    return case == "ok"


def forget_call(
    executor: Executor, key: Key, shown: Record | str | None = None, *, force: bool = False
) -> str:
    """Deletes the record of `key`, its message, and its offloaded values.

    Args:
        shown: as for :func:`commands.forget`: deletes only the record that the caller saw.
        force: also while an execution runs.

    Returns:
        ``ok``, ``absent``, ``changed`` or ``running``, the replies of lua/forget.lua.

    Raises:
        StoreUnavailableError: if Redis is unavailable.
    """
    reply = run_sync(executor.store.execute(commands.forget(key, shown, force=force)))
    if reply.case == "ok":
        with contextlib.suppress(CorruptRecordError):
            record = executor.store.record(key, reply.raw)
            run_sync(executor.codec.delete_record_objects(record))
            if record.state is State.FAILED:
                delete_message(executor, key, record.task_id)
    return reply.case


def _record_to_forget(executor: Executor, key: Key) -> Record | str:
    """Returns the record of `key` as :func:`forget_call` takes it in `shown`.

    Raises:
        StoreUnavailableError: if Redis is unavailable.
    """
    try:
        return run_sync(executor.store.get(key)) or commands.NO_RECORD
    except CorruptRecordError:
        return commands.UNREADABLE


def delete_message(executor: Executor, key: Key, task_id: str) -> None:
    """Deletes the kept message of `task_id`, if there is one.

    Raises:
        StoreUnavailableError: if Redis is unavailable.
    """
    # The whole message is not needed: if it is offloaded, its body is the short name of an object,
    # which is then deleted.
    message = _read_message(executor, key, task_id, _MAX_NAME)
    if message is not None:
        executor.store.query("DEL", executor.store.name(key.kept_message(task_id)))
        run_sync(executor.codec.delete_object(message, str(key), message_field(task_id)))


def kept_message(executor: Executor, key: Key, task_id: str) -> Payload | None:
    """Returns the message that was kept for `task_id`, beside the record of `key`, or None.

    Raises:
        StoreUnavailableError: if Redis is unavailable.
        CorruptRecordError: if it is too large.
    """
    message = _read_message(executor, key, task_id, MAX_DECODED)
    if message is not None and len(message.to_bytes()) == MAX_DECODED:
        raise CorruptRecordError(f"{key}: its kept message is too large")
    return message


def _read_message(executor: Executor, key: Key, task_id: str, size: int) -> Payload | None:
    """Returns the first `size` bytes of a kept message; None if there is none."""
    name = executor.store.name(key.kept_message(task_id))
    value = executor.store.query("GETRANGE", name, 0, size - 1)
    return Payload.from_bytes(value) if value else None
