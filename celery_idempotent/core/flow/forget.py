"""Forgets a call: deletes its record, the message that is kept for it, and its offloaded values."""

from __future__ import annotations

import contextlib

from celery_idempotent.core.flow.thread import Executor
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.value_codec import MAX_DECODED
from celery_idempotent.core.record import Payload, Record, State, message_field
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.errors import CorruptRecordError

#: Maximum bytes of the name of an object.
_MAX_NAME = 4096


def forget_call(
    executor: Executor, key: Key, shown: Record | str | None = None, *, force: bool = False
) -> str:
    """Deletes the record of `key`, its message, and its offloaded values.

    Args:
        shown: as for :func:`commands.forget`.
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


def record_to_forget(executor: Executor, key: Key) -> Record | str:
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
    # One that is offloaded is only the name of an object.
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
