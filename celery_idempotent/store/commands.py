"""Commands on a record: each transition as a value, for every transport."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record
from celery_idempotent.record.traceparent import append_traceparent
from celery_idempotent.store.scripts import Script, load

#: Passed to `forget` for a record that cannot be read.
UNREADABLE = "?"
#: No record has this state, so none is deleted.
NO_RECORD = "-"


class Command(NamedTuple):
    """One call of a script. Sent twice, a command gets the same reply twice, except `forget`."""

    script: Script
    key: Key
    #: In the order of the script's head.
    arguments: list[Any]
    #: Name of the task's result in its result backend, if the script also writes that.
    result_name: str | bytes = b""
    #: Of the message, if the script takes its entry.
    root: bytes = b""


class BackendResult(NamedTuple):
    """A task's result, as its result backend stores it in the Redis of the records."""

    name: str | bytes
    meta: str | bytes
    #: Seconds; 0: never.
    expires: int


class LeaseExtension(NamedTuple):
    """The extension of one lease."""

    key: Key
    token: int
    lease_ms: int
    retention_ms: int
    #: Of the message and the delivery; set for the lease of a continuation.
    root: bytes = b""
    execution_id: bytes = b""


def begin(
    key: Key,
    *,
    label: str = "",
    execution_id: bytes,
    unanswered_ids: bytes,
    task_id: str,
    root: bytes,
    generation: int = 0,
    worker: str,
    lease_ms: int,
    retention_ms: int,
    max_attempts: int,
    error_ms: int,
    continues: bool = False,
    next_turn_ms: int = 0,
    min_retention_ms: int = 0,
) -> Command:
    """Requests the right to run; lua/begin.lua lists the replies.

    Args:
        root: of the message: `key.default_root`, or generated when it was published.
        continues: whether the task has a continuation.
        next_turn_ms: how long to reserve the next turn of `key`, if it may run again, for this
            message while another run is active; 0 disables it.
        min_retention_ms: how long to keep the outcome of an execution that this call finds running,
            even if its retention is shorter.
    """
    arguments = [
        execution_id,
        unanswered_ids,
        layout.write_task_id(task_id),
        root,
        generation,
        layout.write_fingerprint(key.fingerprint, label) if label else key.fingerprint,
        _worker(worker),
        lease_ms,
        lease_ms + retention_ms,
        max_attempts,
        error_ms,
        int(continues),
    ]
    if key.message or min_retention_ms:
        arguments.append(next_turn_ms)
    if min_retention_ms:
        arguments.append(min_retention_ms)
    return Command(load("begin"), key, arguments, root=root)


def extend(lease: LeaseExtension) -> Command:
    """Extends a lease: ``ok`` or ``lost``."""
    key, token, lease_ms, retention_ms, root, execution_id = lease
    if execution_id:
        return Command(load("continuation"), key, [execution_id, lease_ms], root=root)
    return Command(load("extend"), key, [token, lease_ms, lease_ms + retention_ms])


def complete(
    key: Key,
    token: int,
    result: Payload,
    retention_ms: int,
    backend_result: BackendResult | None = None,
    *,
    sending_ms: int | None = None,
) -> Command:
    """Stores the result: ``ok`` or ``lost``; ``written`` if it also stores `backend_result`.

    Args:
        sending_ms: how long sending the continuation may take; 0: it is not sent, as for a task
            that replaces itself; None: there is none. `backend_result` is only for a task without a
            continuation.
    """
    arguments = [token, append_traceparent(result.format), result.body, retention_ms]
    if backend_result is None:
        return Command(
            load("complete"), key, [*arguments, "" if sending_ms is None else sending_ms]
        )
    name, meta, expires = backend_result
    return Command(load("fused_complete"), key, [*arguments, meta, expires], name)


def write_result(key: Key, result: BackendResult) -> Command:
    """Stores `result` for a replay and leaves the record as it is: ``written`` or ``ok``."""
    name, meta, expires = result
    return Command(load("fused_complete"), key, [0, "", b"", 0, meta, expires], name)


def without_backend_result(command: Command) -> Command:
    """Returns `command` without the backend result: it only completes the record."""
    return Command(load("complete"), command.key, [*command.arguments[:4], ""])


def fail(
    key: Key, token: int, error: Payload, retention_ms: int, *, sending_ms: int | None = None
) -> Command:
    """Stores an error as the outcome: ``ok`` or ``lost``; `sending_ms` as for :func:`complete`."""
    arguments = [token, append_traceparent(error.format), error.body, retention_ms]
    return Command(load("fail"), key, [*arguments, "" if sending_ms is None else sending_ms])


def release(
    key: Key,
    token: int,
    *,
    hold_ms: int,
    retention_ms: int,
    root: bytes,
    generation: int = 0,
    error: Payload | None = None,
    error_ms: int = 0,
    sending_ms: int | None = None,
) -> Command:
    """Releases the key, or reserves it for a retry of the message: ``ok`` or ``lost``.

    Args:
        hold_ms: how long the key is reserved; 0 releases it.
        root: of the message.
        generation: of the retry that holds the key, or of the message that `error` ended.
        error: raised by copies of that message.
        sending_ms: how long sending the errbacks may take; None: there are none.
    """
    ended = _final_error(generation, error, error_ms)
    arguments = [token, hold_ms, retention_ms, *ended, "" if sending_ms is None else sending_ms]
    return Command(load("release"), key, arguments, root=root)


def save_step(key: Key, token: int, entry: bytes, *, lease_ms: int, retention_ms: int) -> Command:
    """Stores a finished step and extends the lease: ``ok`` or ``lost``."""
    return Command(load("save_step"), key, [token, entry, lease_ms, lease_ms + retention_ms])


def mark_continued(key: Key, root: bytes, execution_id: bytes) -> Command:
    """Records that this delivery has sent the continuation: ``ok`` or ``lost``."""
    return Command(load("continuation"), key, [execution_id, ""], root=root)


def stop_sending(key: Key, root: bytes, execution_id: bytes) -> Command:
    """Lets another delivery send the continuation: ``ok`` or ``lost``."""
    return Command(load("continuation"), key, [execution_id, 0], root=root)


def abandon(
    key: Key,
    task_id: str,
    worker: str,
    *,
    root: bytes,
    grace_ms: int,
    generation: int = 0,
    reason: str = "",
    error: Payload | None = None,
    error_ms: int = 0,
    execution_id: bytes = b"",
    sending_ms: int | None = None,
) -> Command:
    """Ends the lease of a worker process that died or is about to: ``ok`` or ``lost``.

    ``sending`` if the execution had ended and only its continuation was still being sent.

    Args:
        root: of the message.
        reason: how the execution ends, without spaces; `Record.ended_by` until the next begin.
        error: raised by copies of a message that does not return to the broker.
        execution_id: of the parent process, which sends the errbacks.
        sending_ms: how long that may take; None: there are none.
    """
    ended = _final_error(generation, error, error_ms) if error else (generation, reason, b"", 0)
    process = layout.write_task_id(task_id), root, _worker(worker), grace_ms
    arguments = [*process, *ended, execution_id, "" if sending_ms is None else sending_ms]
    return Command(load("abandon"), key, arguments, root=root)


def reserve(
    key: Key, task_id: str, hold_ms: int, label: str = "", *, waits: bool = False
) -> Command:
    """Reserves the key for a task to be published; the script's head lists the replies.

    Args:
        hold_ms: how long the key is reserved; 0 gives the reservation back.
        waits: while an execution runs, reserve the next turn (for a key that may run again).
    """
    fingerprint = layout.write_fingerprint(key.fingerprint, label)
    arguments = [layout.write_task_id(task_id), fingerprint, hold_ms]
    if not key.message:
        return Command(load("reserve"), key, arguments)
    return Command(load("reserve_turn"), key.turn, [*arguments, int(waits)])


def get(key: Key) -> Command:
    """Reads the record and its remaining time: ``found`` or ``absent``."""
    return Command(load("get"), key, [])


def get_entry(key: Key, root: bytes) -> Command:
    """Reads the entry of a message: ``found`` or ``absent``."""
    return Command(load("get"), key.entry(root), [])


def forget(key: Key, shown: Record | str | None = None) -> Command:
    """Deletes the record: ``ok``, ``absent`` or ``changed``.

    Args:
        shown: delete only a record that still has this state and token; ``UNREADABLE``: only one
            that cannot be read; ``NO_RECORD``: none; None: any.
    """
    if isinstance(shown, Record):
        return Command(load("forget"), key, [shown.state.value[0], shown.token])
    return Command(load("forget"), key, [shown or "", ""])


def _final_error(generation: int, error: Payload | None, error_ms: int) -> tuple[Any, ...]:
    """Returns the arguments generation, format, error and error_ms."""
    if error is None:
        return generation, "", b"", 0
    return generation, append_traceparent(error.format), error.body, error_ms


@lru_cache(64)
def _worker(name: str) -> bytes:
    """Returns the end of `name` that fits in the record's field, including the pid."""
    return name.encode()[-255:].decode(errors="ignore").encode()
