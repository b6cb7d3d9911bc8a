"""The byte layout of a record, the same in each script of lua/.

===========  =====  ==========================================================================
field        bytes  content
===========  =====  ==========================================================================
letter           1  the state, see lua/begin.lua; other layouts use other letters
attempt          1
token            7  big-endian, microseconds
at_ms            6  big-endian, milliseconds: the end of the lease, of the reservation, or of the
                    time for sending the continuation; of any other outcome, when it was stored
fingerprint    1 +  length, then 8 bytes, or none
task_id        2 +  length, then bytes; a UUID is a zero byte and its 16 bytes
worker         1 +  length, then UTF-8
owner          1 +  length, then what may continue: B, A: the execution id (8 bytes) and, after a
                    takeover, in decimal, for how many milliseconds the key was orphaned; W, D:
                    in decimal, the first generation of the message that continues; a: how the
                    execution ended, as its parent process reports
tail           1 +  length, then what no script reads: the lines of `Tail`, in UTF-8
body          rest  the outcome, or the reason why no value is stored; D, X: the id of the other
                    task; before the outcome, the finished steps, see record/steps.py
===========  =====  ==========================================================================

The turn of a key that may run again has the token of the last execution (7 bytes) and the name of
its record. Its first byte is a control character, never a letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from celery_idempotent.core.record import Record, State, Tail
from celery_idempotent.errors import CorruptRecordError, IdempotencyError

#: Covers everything that two releases exchange through Redis, messages and databases.
#: Incremented when the previous release cannot read what this one writes: docs/upgrading.md.
VERSION = 3

_STATES = {
    **dict.fromkeys(b"W", State.RESERVED),
    **dict.fromkeys(b"BAba", State.STARTED),
    **dict.fromkeys(b"VTtD", State.COMPLETED),
    **dict.fromkeys(b"EX", State.FAILED),
}
#: Letters. T, t: the result is stored, and the continuation is to be sent. D: the outcome is that
#: of another task. X: a newer call has replaced this one. a: the lease of an execution has ended.
_SENDING, _DELEGATED, _REPLACED, _DEAD = b"Tt", ord("D"), ord("X"), ord("a")
#: The `owner` of a call whose place a newer call has taken, as lua/begin.lua writes it: a
#: generation that no message reaches, so the call never continues.
_SUPERSEDED = 10**16 - 1
#: Format of a result that another task will return.
DELEGATED = "=task"
#: Letters of records without an outcome.
UNFINISHED = (b"W", b"B", b"A", b"b", b"a")
#: Bytes of an execution id.
ID_BYTES = 8
#: How an execution ended without an outcome: reported by the worker's main process or, if its body
#: has ended the process, by the process itself.
HARD_TIME_LIMIT, PROCESS_LOST, TERMINATED, PROCESS_EXIT = ENDS = (
    "hard_time_limit",
    "process_lost",
    "terminated",
    "process_exit",
)
#: Bytes before the first field of variable length.
_FIXED = 15
#: Bytes of a task id. AMQP allows 255.
_MAX_TASK_ID = 1000
#: Reading so many bytes of a record reads all fields before its body.
HEAD_BYTES = 2048
#: A UUID in the form that `str` gives it. `UUID` also accepts other forms, which a record could not
#: give back as they were.
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
#: Body of a FAILED record whose executions died, as often in a row as the settings allow.
POISONED = b"poisoned"
#: A record with a later time (this one is in the year 6429) is damaged.
_MAX_MS = 2**47


#: Letter, attempt, token, at_ms, fingerprint, task_id, worker, owner, tail, body; undecoded.
_Fields = tuple[int, int, int, int, bytes, bytes, bytes, bytes, bytes, bytes]


def _unpack(raw: bytes) -> _Fields:
    """Splits a record into its fields; raises IndexError if it is truncated."""
    task_id_start = _FIXED + 1 + raw[_FIXED] + 2
    task_id_end = task_id_start + int.from_bytes(raw[task_id_start - 2 : task_id_start], "big")
    worker_end = task_id_end + 1 + raw[task_id_end]
    owner_end = worker_end + 1 + raw[worker_end]
    format_end = owner_end + 1 + raw[owner_end]
    if format_end > len(raw):
        raise IndexError(format_end)
    return (
        raw[0],
        raw[1],
        int.from_bytes(raw[2:9], "big"),
        int.from_bytes(raw[9:15], "big"),
        raw[_FIXED + 1 : task_id_start - 2],
        raw[task_id_start:task_id_end],
        raw[task_id_end + 1 : worker_end],
        raw[worker_end + 1 : owner_end],
        raw[owner_end + 1 : format_end],
        raw[format_end:],
    )


class Head(NamedTuple):
    """The fields at the start of a record, whose position is fixed."""

    letter: bytes
    token: int
    at_ms: int


def read_head(raw: bytes) -> Head:
    """Returns the head of a record; that of a missing one is empty."""
    return Head(raw[:1], int.from_bytes(raw[2:9], "big"), int.from_bytes(raw[9:_FIXED], "big"))


def read(
    raw: bytes,
    key: str,
    task: str,
    decode: Callable[[Record], Any] | None = None,
    expires_at: datetime | None = None,
) -> Record:
    """Returns the record that `raw` holds for `key`.

    Raises:
        CorruptRecordError: if `raw` is truncated, or not a record of this layout.
    """
    try:
        letter, attempt, token, at_ms, fingerprint, task_id, worker, owner, end, body = _unpack(raw)
        if at_ms >= _MAX_MS:
            raise ValueError(at_ms)
        tail = Tail.from_bytes(end)
        if letter == _DELEGATED and not tail.format:
            tail = tail._replace(format=DELEGATED)
        reason = owner.decode(errors="replace") if letter == _DEAD else ""
        return Record(
            state=_STATES[letter],
            key=key,
            task=task,
            task_id=read_task_id(task_id),
            worker=worker.decode(),
            token=token,
            attempt=attempt,
            sending_until_ms=at_ms if letter in _SENDING else 0,
            at_ms=at_ms,
            fingerprint=fingerprint,
            **tail._asdict(),
            body=body,
            awaited=int(owner or 0) if letter in b"WDX" else 0,
            ended_by=reason if reason in ENDS else None,
            decode=decode,
            expires_at=expires_at,
        )
    except (IndexError, KeyError, ValueError):
        raise corrupt(key) from None


def read_slot(raw: bytes, key: str, task: str, expires_at: datetime | None = None) -> Record:
    """Returns the record of a message that was published and has not begun; see lua/queue.lua.

    Raises:
        CorruptRecordError: if `raw` is no slot.
    """
    slot = read(raw, key, task, expires_at=expires_at)
    at_ms = _MAX_MS if expires_at is None else round(expires_at.timestamp() * 1000)
    return replace(slot, at_ms=at_ms, body=b"")


def letters_of(state: State) -> str:
    """Returns the letters of records in `state`, as one text."""
    return "".join(chr(letter) for letter, of_state in _STATES.items() if of_state is state)


def turn_holder(raw: bytes) -> str | None:
    """Returns the name of the record that a turn names; None if `raw` is not a turn."""
    return raw[7:].decode(errors="replace") if raw and raw[0] < ord(" ") else None


def turn_token(raw: bytes) -> int:
    """Returns the token of a turn."""
    return int.from_bytes(raw[:7], "big")


def is_abandoned(raw: bytes, token: int, worker: str) -> bool:
    """Whether lua/abandon.lua ended the execution with `token` and none has begun since."""
    try:
        letter, _, stored_token, _, _, _, stored_worker, owner, _, _ = _unpack(raw)
    except IndexError:
        return False
    return (
        letter == _DEAD
        and stored_token == token + 1
        and owner.decode(errors="replace") in ENDS
        and stored_worker.decode(errors="replace") == worker
    )


class Begun(NamedTuple):
    """The fields of a STARTED record that its execution needs."""

    token: int
    attempt: int
    #: The steps that earlier executions finished.
    body: bytes
    #: For a takeover: seconds since the end of the previous lease.
    orphaned_seconds: float | None = None


def begun(raw: bytes) -> Begun:
    """Returns what an execution needs from the record in the reply to its begin."""
    _, attempt, token, _, _, _, _, owner, _, body = _unpack(raw)
    orphaned_ms = owner[ID_BYTES:]
    return Begun(token, attempt, body, int(orphaned_ms) / 1000 if orphaned_ms else None)


def is_poisoned(record: Record) -> bool:
    """Whether the outcome of `record` is that its executions died, not an error of a body."""
    return record.state is State.FAILED and not record.format and record.body == POISONED


def is_superseded(record: Record) -> bool:
    """Whether a newer call, whose id is the body, has taken the place of one that had not begun."""
    return record.state is State.COMPLETED and record.awaited == _SUPERSEDED


def is_replaced(record: Record) -> bool:
    """Whether a newer call, whose id is the body, has taken the key from one that was running."""
    return record.state is State.FAILED and record.awaited == _SUPERSEDED


def corrupt(key: str) -> CorruptRecordError:
    """Returns the error for a record that cannot be read."""
    return CorruptRecordError(
        f"the record of {key} cannot be read: it is damaged, of another kind, or written by "
        "another version; forget the key to start afresh"
    )


def write_task_id(task_id: str) -> bytes:
    """Encodes a task id: a UUID, as Celery generates, in half its length; any other unchanged.

    Raises:
        IdempotencyError: if it is too long for a record, or cannot be encoded.
    """
    if _UUID.fullmatch(task_id):
        return b"\0" + bytes.fromhex(task_id.replace("-", ""))
    try:
        data = task_id.encode()
    except UnicodeEncodeError:
        raise IdempotencyError("the task's id contains a lone surrogate: use another id") from None
    if len(data) > _MAX_TASK_ID:
        raise IdempotencyError(
            f"the task's id has {len(data)} bytes, but a record can hold {_MAX_TASK_ID}: "
            "use a shorter id"
        )
    return b"\1" + data if data[:1] in (b"\0", b"\1") else data


def read_task_id(data: bytes) -> str:
    """Decodes what :func:`write_task_id` returned."""
    if data[:1] == b"\0":
        return str(UUID(bytes=data[1:]))
    return data.removeprefix(b"\1").decode()
