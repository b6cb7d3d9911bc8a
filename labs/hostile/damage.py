"""Changes every byte of records and headers, and looks at what a message meets then.

A changed byte may give a record that is as valid as before: nothing but encryption can tell. What
must not happen is any error but those of this library, or a change of the record by a message that
could not read it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from celery.utils.serialization import UnpickleableExceptionWrapper
from redis import Redis

from celery_idempotent.core.key.key import Key
from celery_idempotent.core.task.message.message_headers import (
    MessageHeaders,
    bind,
    with_derived_key,
)
from celery_idempotent.errors import IdempotencyError
from labs.hostile.messages import CALLS, FAILS, NAME, RETRIES, Worker, worker

#: Each is flipped; the byte is also set to 0 and to 255.
BITS = tuple(1 << bit for bit in range(8))
CORRUPT = "CorruptRecordError"
#: The last is an error whose stored class does not exist.
EXPECTED = IdempotencyError, LookupError, UnpickleableExceptionWrapper

STATES = ("completed", "failed", "runs", "runs, one waits", "retries", "published")


class Verdict:
    def __init__(self) -> None:
        self.changes = 0
        #: How the messages ended, and the last one of them.
        self.met: Counter[str] = Counter()
        self.last = ""
        self.failures: list[str] = []


def records(url: str, **settings: Any) -> Iterator[Verdict]:
    """Damages the records of calls in every state; yields the verdict after each."""
    verdict, client = Verdict(), Redis.from_url(url)
    receiver = worker(url, idempotency_lease=3600, idempotency_reservation_ttl=3600, **settings)
    sealed = "idempotency_encryption_keys" in settings
    for state in STATES:
        args, answer, stored = _call(receiver, client, state)
        for name, raw in stored.items():
            for position, byte in enumerate(raw):
                for other in {*(byte ^ bit for bit in BITS), 0, 255} - {byte}:
                    damaged = raw[:position] + bytes([other]) + raw[position + 1 :]
                    client.mset({**stored, name: damaged})
                    verdict.changes += 1
                    failure = _meet(receiver, args, answer if sealed else None, verdict)
                    # A conflict marks a record that runs: its outcome is kept for the duplicate.
                    is_marked = state.startswith("runs")
                    if verdict.last == CORRUPT and client.get(name) != damaged and not is_marked:
                        failure = "the record could not be read, and was changed"
                    if failure:
                        where = f"{state}, {name.decode()}, byte {position} is {other}"
                        verdict.failures.append(f"{where}: {failure}")
        yield verdict


def _call(receiver: Worker, client: Redis, state: str) -> tuple[Any, str, dict[bytes, bytes]]:
    """Makes a call with records in `state`; returns its arguments, its answer and the records."""
    client.flushall()
    args = ({"failed": FAILS, "retries": RETRIES}.get(state, CALLS), "order")
    stored: dict[bytes, bytes] = {}

    def during() -> None:
        receiver.during = lambda: None
        if state == "runs, one waits":
            receiver.receive(args, {})
        stored.update(_stored(client))

    receiver.during = during
    if state == "published":
        receiver.task.apply_async(args)
        return args, "", _stored(client)
    answer = repr(receiver.receive(args, {}))
    return args, answer, stored if state.startswith("runs") else _stored(client)


def _stored(client: Redis) -> dict[bytes, bytes]:
    """Returns the records and entries, without references and counters."""
    names = [name for name in client.scan_iter("idem:*") if client.type(name) == b"string"]
    return {name: raw for name in names if b"@" not in name and (raw := client.get(name))}


def _meet(receiver: Worker, args: Any, answer: str | None, verdict: Verdict) -> str:
    """Sends a duplicate; returns what is wrong with its end.

    Args:
        answer: the only one that it may get; None if other values cannot be distinguished from it.
    """
    try:
        status, value = receiver.receive(args, {})
        with contextlib.suppress(IdempotencyError):
            receiver.task.idempotency_record(*args)
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    kind = verdict.last = type(value).__name__ if isinstance(value, Exception) else status
    verdict.met[kind] += 1
    if isinstance(value, Exception) and not isinstance(value, EXPECTED):
        return f"ends with {kind}: {value}"
    if answer and kind in ("SUCCESS", "LookupError") and repr((status, value)) != answer:
        return f"gets {value!r}"
    return ""


def headers() -> Verdict:
    """Damages the headers that a message carries, a character at a time."""
    verdict, task_id = Verdict(), str(uuid.uuid4())
    key = Key.of(NAME, b"hashed", b"87654321")
    written = [
        bind(NAME, task_id, {"idempotency_key": "order-1", "idempotency_result_ttl": 60}),
        bind(NAME, task_id, {"idempotency_key": ["a", "b"]}),
        with_derived_key(
            None,
            key,
            task_id,
            requeue_count=3,
            rollback_count=2,
            forgets=77,
        ),
    ]
    for original in written:
        as_written = MessageHeaders.read(NAME, task_id, original)
        for name, text in original.items():
            for position, character in enumerate(text if isinstance(text, str) else ""):
                flipped = {chr((ord(character) ^ bit) & 127) for bit in BITS}
                for other in flipped | {"", "é", "\ud800"}:
                    changed = {**original, name: text[:position] + other + text[position + 1 :]}
                    verdict.changes += 1
                    try:
                        read = MessageHeaders.read(NAME, task_id, changed)
                        verdict.met["as before" if read == as_written else "read"] += 1
                    except IdempotencyError as error:
                        verdict.met[type(error).__name__] += 1
                    except Exception as error:
                        failure = f"{changed!r}: {type(error).__name__}: {error}"
                        verdict.failures.append(failure)
    return verdict
