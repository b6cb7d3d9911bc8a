"""What can be asked of a record: each transition as a value, whoever executes it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record
from celery_idempotent.record.traceparent import append_traceparent
from celery_idempotent.store import scripts
from celery_idempotent.store.scripts import Script

#: What `forget` is given of a record that cannot be read.
UNREADABLE = "?"


class Command(NamedTuple):
    """One call of a script: one round trip, and whoever sends it twice is answered the same."""

    script: Script
    key: Key
    #: In the order of the script's head.
    arguments: list[Any]


class Extension(NamedTuple):
    """One lease that a heartbeat extends."""

    key: Key
    token: int
    lease_ms: int
    retention_ms: int


def begin(
    key: Key,
    *,
    execution_id: bytes,
    unanswered_ids: bytes,
    task_id: str,
    generation: int = 0,
    worker: str,
    lease_ms: int,
    retention_ms: int,
    max_attempts: int,
    error_ms: int,
) -> Command:
    """Ask for the right to run; see lua/begin.lua for the cases."""
    return _command(
        "begin",
        key,
        execution_id=execution_id,
        unanswered_ids=unanswered_ids,
        task_id=layout.write_task_id(task_id),
        generation=generation,
        fingerprint=key.fingerprint,
        worker=_worker(worker),
        lease_ms=lease_ms,
        ttl_ms=lease_ms + retention_ms,
        max_attempts=max_attempts,
        error_ms=error_ms,
    )


def extend(lease: Extension) -> Command:
    """The lease ends later: ``ok`` or ``lost``."""
    return _command(
        "extend",
        lease.key,
        token=lease.token,
        lease_ms=lease.lease_ms,
        ttl_ms=lease.lease_ms + lease.retention_ms,
    )


def complete(key: Key, token: int, result: Payload, retention_ms: int) -> Command:
    """Store the result: ``ok`` or ``lost``."""
    return _command(
        "complete",
        key,
        token=token,
        format=append_traceparent(result.format),
        body=result.body,
        retention_ms=retention_ms,
    )


def fail(key: Key, token: int, error: Payload, retention_ms: int) -> Command:
    """Store an error that ends the key: ``ok`` or ``lost``."""
    return _command(
        "fail",
        key,
        token=token,
        format=append_traceparent(error.format),
        body=error.body,
        retention_ms=retention_ms,
    )


def release(
    key: Key,
    token: int,
    *,
    hold_ms: int,
    retention_ms: int,
    generation: int = 0,
    error: Payload | None = None,
    error_ms: int = 0,
) -> Command:
    """Give the key back, or hold it for its task id: ``ok`` or ``lost``.

    Args:
        generation: of the retry that it is held for, or of the message that `error` ended.
        error: what copies of that message get.
    """
    return _command(
        "release",
        key,
        token=token,
        hold_ms=hold_ms,
        retention_ms=retention_ms,
        **_last_word(generation, error, error_ms),
    )


def step(key: Key, token: int, entry: bytes, *, lease_ms: int, retention_ms: int) -> Command:
    """Keep a finished step: ``ok`` or ``lost``."""
    ttl_ms = lease_ms + retention_ms
    return _command("save_step", key, token=token, entry=entry, lease_ms=lease_ms, ttl_ms=ttl_ms)


def mark_continued(key: Key, task_id: str) -> Command:
    """Note that the continuation of `task_id` has gone out: ``ok`` or ``lost``."""
    return _command("mark_continued", key, task_id=layout.write_task_id(task_id))


def abandon(
    key: Key,
    task_id: str,
    worker: str,
    *,
    grace_ms: int,
    generation: int = 0,
    error: Payload | None = None,
    error_ms: int = 0,
) -> Command:
    """End the lease of a worker process that died, or will: ``ok`` or ``lost``.

    Args:
        error: what copies of the message get, if it does not go back to the broker.
    """
    return _command(
        "abandon",
        key,
        task_id=layout.write_task_id(task_id),
        worker=_worker(worker),
        grace_ms=grace_ms,
        **_last_word(generation, error, error_ms),
    )


def reserve(key: Key, task_id: str, hold_ms: int) -> Command:
    """Keep the key for a task to be published; see lua/reserve.lua for the cases."""
    return _command(
        "reserve",
        key,
        task_id=layout.write_task_id(task_id),
        fingerprint=key.fingerprint,
        hold_ms=hold_ms,
    )


def get(key: Key) -> Command:
    """Read the record: ``found``, with its time to live, or ``absent``."""
    return _command("get", key)


def forget(key: Key, shown: Record | str | None = None) -> Command:
    """Drop the record: ``ok``, ``absent`` or ``changed``.

    Args:
        shown: drop it only if it is still in this state under this token; ``UNREADABLE``: only if
            it cannot be read; None: whatever it is.
    """
    if isinstance(shown, Record):
        return _command("forget", key, state=shown.state.value[0], token=shown.token)
    return _command("forget", key, state=shown or "", token="")


def _command(name: str, key: Key, **values: Any) -> Command:
    script = scripts.load(name)
    # A missing or unknown name is an error here, not a wrong argument in Redis.
    if len(values) != len(script.argv):
        raise KeyError(f"{name} takes {script.argv}, got {tuple(values)}")
    return Command(script, key, list(map(values.__getitem__, script.argv)))


def _last_word(generation: int, error: Payload | None, error_ms: int) -> dict[str, Any]:
    if error is None:
        return {"generation": generation, "format": "", "error": b"", "error_ms": 0}
    form = append_traceparent(error.format)
    return {"generation": generation, "format": form, "error": error.body, "error_ms": error_ms}


@lru_cache(64)
def _worker(name: str) -> bytes:
    """`name` cut to what the record has room for, its end kept: that is where the pid stands."""
    return name.encode()[-255:].decode(errors="ignore").encode()
