"""Commands on a record: each transition as a value that every transport can send.

A function for each transition fills in the arguments that the head of its script lists. Nothing is
sent here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Payload, Record, Tail, layout
from celery_idempotent.core.store.scripts import Script, load

#: What a script's KEYS can be: the record of the key or of a message, the slot of the key, its
#: turn.
RECORD, SLOT, TURN = "record", "slot", "turn"
_EMPTY, _NO_TAIL = Payload("", b""), Tail()
#: Stands in the arguments of a command for the deadline, which `RecordStore` puts in its place.
DEADLINE: Any = object()
#: Values of `replaces` in `begin`. 1: the call takes the key from a running one. 2: it takes it
#: from a dead one, whose record then refers to it.
REPLACES, REPLACES_DEAD = 1, 2
#: What `forget` gets in place of a record that cannot be read, or that does not exist.
UNREADABLE, NO_RECORD = "?", "0"
#: Returns the W3C traceparent of the current span, or "". The record stores it, so that the span of
#: a replay can link to that of the execution. `contrib.opentelemetry` sets it.
current_traceparent: Callable[[], str] | None = None


class Command(NamedTuple):
    """One call of a script. Sent twice, a command gets the same reply twice, except `forget`."""

    script: Script
    key: Key
    #: The script's KEYS, each one of `RECORD`, `SLOT` and `TURN`; `result_name` follows, if set.
    keys: tuple[str, ...]
    #: The script's ARGV.
    arguments: list[Any]
    #: Name of the task's result in its result backend, if the script also writes that.
    result_name: str | bytes = b""


class BackendResult(NamedTuple):
    """A task's result, as its result backend stores it in the Redis of the records."""

    name: str | bytes
    meta: str | bytes
    #: Seconds for which the backend keeps the result; 0: for ever.
    expires: int


class LeaseExtension(NamedTuple):
    """The extension of one lease."""

    key: Key
    token: int
    lease_ms: int
    retention_ms: int


def begin(
    key: Key,
    *,
    execution_id: bytes,
    task_id: str,
    generation: int = 0,
    worker: str,
    tail: Tail = _NO_TAIL,
    lease_ms: int,
    retention_ms: int,
    hold_ms: int = 0,
    replaces: int = 0,
) -> Command:
    """Requests the right to run; lua/begin.lua lists the replies.

    Args:
        retention_ms: how long a dead execution is remembered.
        hold_ms: how long the message keeps its reservation, at least, if it has to wait. 0:
            messages of the key are not deduplicated when they are published, so there is no slot.
        replaces: as in lua/begin.lua.
    """
    arguments = [
        execution_id,
        layout.write_task_id(task_id),
        generation,
        key.fingerprint,
        _worker(worker),
        tail.to_bytes(),
        lease_ms,
        lease_ms + retention_ms,
        hold_ms,
        DEADLINE,
        replaces,
    ]
    keys = (RECORD, SLOT, TURN) if key.message else (RECORD, SLOT) if hold_ms else (RECORD,)
    return Command(load("begin"), key, keys, arguments)


def extend(lease: LeaseExtension, step: bytes = b"") -> Command:
    """Extends a lease, and stores a finished step: ``ok`` or ``lost``."""
    key, token, lease_ms, retention_ms = lease
    arguments = [token, lease_ms, lease_ms + retention_ms, step]
    return Command(load("extend"), key, (RECORD, TURN) if key.message else (RECORD,), arguments)


def _settle(
    key: Key,
    token: int,
    letter: str,
    *,
    retention_ms: int = 0,
    at_ms: int = 0,
    owner: int | str = "",
    payload: Payload = _EMPTY,
    tail: Tail = _NO_TAIL,
    result: BackendResult | None = None,
) -> Command:
    """Returns the command that ends an execution; lua/settle.lua describes its arguments."""
    trace = current_traceparent() if current_traceparent and letter in "VTE" else ""
    tail = tail._replace(format=payload.format, traceparent=trace)
    name, meta, expires = result or (b"", b"", 0)
    keys = (RECORD, TURN) if letter == "W" and key.message else (RECORD,)
    value = tail.to_bytes(), payload.body
    arguments = [token, letter, at_ms, owner, *value, retention_ms, meta, expires]
    return Command(load("settle"), key, keys, arguments, name)


def complete(
    key: Key,
    token: int,
    result: Payload,
    retention_ms: int,
    backend_result: BackendResult | None = None,
    *,
    tail: Tail = _NO_TAIL,
    sending_ms: int = 0,
) -> Command:
    """Stores the result: ``ok`` or ``lost``; ``written`` if it also stores `backend_result`.

    Args:
        sending_ms: how long sending the continuation may take; 0: there is none. `backend_result`
            is only for a task without a continuation.
    """
    outcome: dict[str, Any] = {"payload": result, "tail": tail, "retention_ms": retention_ms}
    letter = "T" if sending_ms else "V"
    return _settle(key, token, letter, at_ms=sending_ms, result=backend_result, **outcome)


def mark_sent(key: Key, token: int) -> Command:
    """Records that the continuation of a completed execution was sent: ``ok`` or ``lost``."""
    return _settle(key, token, "V")


def fail(key: Key, token: int, error: Payload, retention_ms: int, tail: Tail = _NO_TAIL) -> Command:
    """Stores an error as the outcome: ``ok`` or ``lost``."""
    return _settle(key, token, "E", payload=error, tail=tail, retention_ms=retention_ms)


def poison(key: Key, token: int, retention_ms: int, tail: Tail = _NO_TAIL) -> Command:
    """Stores that the executions of the key have died: ``ok`` or ``lost``."""
    return fail(key, token, Payload("", layout.POISONED), retention_ms, tail)


def delegate(
    key: Key,
    token: int,
    task_id: Payload,
    generation: int,
    retention_ms: int,
    tail: Tail = _NO_TAIL,
) -> Command:
    """Stores that another task's outcome is that of the key: ``ok`` or ``lost``.

    Args:
        task_id: the other task's id, with a format that shows whether that task stores its result.
        generation: the generation of the first message of this task that continues under the key.
    """
    outcome: dict[str, Any] = {"payload": task_id, "tail": tail, "retention_ms": retention_ms}
    return _settle(key, token, "D", owner=generation, **outcome)


def release(key: Key, token: int, *, retention_ms: int) -> Command:
    """Frees the key: ``ok`` or ``lost``.

    Args:
        retention_ms: how long finished steps are kept for the next execution.
    """
    return _settle(key, token, "", retention_ms=retention_ms)


def reserve_retry(
    key: Key, token: int, *, hold_ms: int, retention_ms: int, generation: int
) -> Command:
    """Reserves the key of an execution for its retry: ``ok`` or ``lost``.

    Args:
        hold_ms: how long the key is reserved.
        retention_ms: how long the record is kept; longer than `hold_ms` if there are steps.
        generation: the generation of the retry's message.
    """
    return _settle(key, token, "W", at_ms=hold_ms, owner=generation, retention_ms=retention_ms)


def write_result(key: Key, result: BackendResult) -> Command:
    """Stores `result` for a replay and leaves the record as it is: ``written`` or ``ok``."""
    return _settle(key, 0, "V", result=result)


def without_backend_result(command: Command) -> Command:
    """Returns `command` without the backend result: it only completes the record."""
    return command._replace(arguments=[*command.arguments[:7], b"", 0], result_name=b"")


def stores_outcome(command: Command) -> bool:
    """Returns whether `command` stores the outcome of an execution."""
    return command.script.name == "settle" and command.arguments[1] in ("V", "T", "E", "D")


def is_durable(command: Command) -> bool:
    """Returns whether the write of `command` must not be lost: a begin, a step or an outcome."""
    name = command.script.name
    return name == "begin" or (name == "extend" and command.arguments[3]) or stores_outcome(command)


def abandon(key: Key, task_id: str, worker: str, *, grace_ms: int, reason: str) -> Command:
    """Ends the lease of a worker process that died or is about to: ``ok`` or ``lost``.

    ``sending`` if the execution had ended and only its continuation was still being sent.

    Args:
        reason: how the execution ends, one of ``layout.ENDS``; `Record.ended_by` until the next
            begin.
    """
    arguments = [layout.write_task_id(task_id), _worker(worker), grace_ms, reason]
    return Command(load("abandon"), key, (RECORD,), arguments)


def reserve(
    key: Key,
    task_id: str,
    hold_ms: int,
    *,
    tail: Tail = _NO_TAIL,
    after_running: bool = False,
    arguments: bytes = b"",
    keep_ms: int = 0,
    quiet_ms: int = 0,
    max_wait_ms: int = 0,
) -> Command:
    """Reserves the key for a message to be published; lua/queue.lua lists the replies.

    Args:
        key: of the message's record.
        hold_ms: how long the key is reserved; 0 gives the reservation back.
        after_running: reserve also while an execution runs, for a key that may run again: the
            message that is published then runs after it.
        arguments: this one and the next three as in lua/queue.lua.
    """
    keys = (SLOT, RECORD, TURN) if key.message and not after_running else (SLOT, RECORD)
    message = layout.write_task_id(task_id), DEADLINE, hold_ms, key.fingerprint, tail.to_bytes()
    newest = arguments, keep_ms, quiet_ms, max_wait_ms
    return Command(load("queue"), key, keys, [*message, *newest])


def give_back(key: Key, task_id: str) -> Command:
    """Ends the reservation of a message that will not begin: ``reserved``."""
    return reserve(key, task_id, 0)


def forget(key: Key, shown: Record | str | None = None, *, force: bool = False) -> Command:
    """Deletes the record; lua/forget.lua lists the replies.

    Args:
        shown: delete only a record that still has this state and token; ``UNREADABLE``: only one
            that cannot be read; ``NO_RECORD``: none; None: any.
        force: also while an execution runs.
    """
    token: Any = shown or ""
    letters = ""
    if isinstance(shown, Record):
        token, letters = shown.token, layout.letters_of(shown.state)
    keys = (RECORD,) if key.message else (RECORD, SLOT)
    return Command(load("forget"), key, keys, [DEADLINE, token, letters, "1" if force else ""])


@lru_cache(64)
def _worker(name: str) -> bytes:
    """Returns the end of `name` that fits in the record's field, including the pid."""
    return name.encode()[-255:].decode(errors="ignore").encode()
