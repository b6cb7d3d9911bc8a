"""The record's bytes. The scripts write and read them too: lua/prelude.lua names the same fields.

==========  =====  ==========================================================================
letter          1  R, S, C, D, F, G or E: the state, and with it this layout; others are newer
attempt         1
token           7  big-endian
at              6  big-endian, milliseconds
fingerprint   1 +  length, then bytes
task_id       2 +  length, then bytes; a UUID is a zero byte and its 16 bytes
worker        1 +  length, then UTF-8
owner         1 +  length, then: STARTED: the id of the execution; RESERVED: in decimals, the
                   generation of the first message that it is for (empty: any), "-": for nobody
format        1 +  length, then ASCII: how to read the body, see store/payload.py, and behind a
                   space the trace that the outcome comes from; STARTED: milliseconds that the key
                   stood still before this takeover, if it is one
body         rest  the outcome, or the reason why no value is kept; before that, errors that ended
                   one task id and not the key, and then the steps: record/steps.py
==========  =====  ==========================================================================

E is RESERVED for nobody with errors alone in its body: absent, but for copies of their messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from celery_idempotent.record.record import Record, State

_STATES = {
    ord("R"): State.RESERVED,
    ord("E"): State.RESERVED,
    ord("S"): State.STARTED,
    ord("C"): State.COMPLETED,
    ord("D"): State.COMPLETED,
    ord("F"): State.FAILED,
    ord("G"): State.FAILED,
}
#: Of these the continuation has gone out.
_CONTINUED = b"DG"
_FIXED = 15
#: And one byte before it, at times.
_LONGEST_TASK_ID = 2**16 - 2
#: As `str` writes one, and nothing that `UUID` would read besides.
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
#: Times beyond are damage: the year 6429.
_NEVER_MS = 2**47


def read(
    raw: bytes,
    key: str,
    task: str,
    decode: Callable[[Record], Any] | None = None,
    expires_at: datetime | None = None,
) -> Record:
    """The record that `raw` holds for `key`.

    Raises:
        CorruptRecordError: if `raw` is cut short, or is no record of this layout.
    """
    try:
        state = _STATES[raw[0]]
        fields, position = [], _FIXED
        for size in (1, 2, 1, 1, 1):
            length = int.from_bytes(raw[position : position + size], "big")
            start, position = position + size, position + size + length
            if position > len(raw):
                raise IndexError(position)
            fields.append(raw[start:position])
        fingerprint, task_id, worker, _owner, form = fields
        form, _, traceparent = form.partition(b" ")
        at_ms = int.from_bytes(raw[9:15], "big")
        if at_ms >= _NEVER_MS:
            raise ValueError(at_ms)
        return Record(
            state=state,
            key=key,
            task=task,
            task_id=read_task_id(task_id),
            worker=worker.decode(),
            token=int.from_bytes(raw[2:9], "big"),
            attempt=raw[1],
            continuation_sent=raw[0] in _CONTINUED,
            at_ms=at_ms,
            fingerprint=fingerprint,
            format=form.decode("ascii"),
            traceparent=traceparent.decode("ascii"),
            body=raw[position:],
            decode=decode,
            expires_at=expires_at,
        )
    except (IndexError, KeyError, ValueError):
        raise corrupt(key) from None


def is_absent(raw: bytes) -> bool:
    """Whether `raw` holds errors of ended task ids alone."""
    return raw[:1] == b"E"


class Begun(NamedTuple):
    """What an execution needs of the STARTED record that granted it."""

    token: int
    attempt: int
    #: The finished steps of executions before it.
    body: bytes
    #: Seconds that the key stood still before it took over; 0 where it did not.
    orphaned_seconds: float = 0.0


def begun(raw: bytes) -> Begun:
    """The part of a record that the server has written this moment; nothing in it is doubted."""
    start = position = _FIXED
    for size in (1, 2, 1, 1, 1):
        start = position + size
        position = start + int.from_bytes(raw[position:start], "big")
    orphaned_seconds = int(raw[start:position] or b"0") / 1000
    return Begun(int.from_bytes(raw[2:9], "big"), raw[1], raw[position:], orphaned_seconds)


def write_replacement(generation: int, task_id: str, steps: bytes) -> bytes:
    """The body of a COMPLETED record whose task has replaced itself.

    Args:
        generation: of the first message that goes on under the key, if it bears the task's id.
        task_id: whose result is the outcome.
        steps: finished ones, for whoever goes on.
    """
    name = write_task_id(task_id)
    return generation.to_bytes(7, "big") + len(name).to_bytes(2, "big") + name + steps


def read_replacement(body: bytes, key: str) -> str:
    """The id of the task whose result is the outcome.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    end = 9 + int.from_bytes(body[7:9], "big")
    if not 9 < end <= len(body):
        raise corrupt(key)
    return read_task_id(body[9:end])


def corrupt(key: str) -> CorruptRecordError:
    """The error for a record that cannot be read."""
    return CorruptRecordError(
        f"the record of {key} cannot be read: it is damaged, of another kind, or written by a "
        "newer version; forget the key to start afresh"
    )


def write_task_id(task_id: str) -> bytes:
    """Half the room for the ids that Celery draws; any other id as it is.

    Raises:
        IdempotencyError: if a record has no room for it, or it is no text that can be written.
    """
    if _UUID.fullmatch(task_id):
        return b"\0" + bytes.fromhex(task_id.replace("-", ""))
    try:
        data = task_id.encode()
    except UnicodeEncodeError:
        raise IdempotencyError("the task's id holds half a letter (a lone surrogate)") from None
    if len(data) > _LONGEST_TASK_ID:
        raise IdempotencyError(
            f"the task's id has {len(data)} bytes; a record has room for {_LONGEST_TASK_ID}"
        )
    return b"\1" + data if data[:1] in (b"\0", b"\1") else data


def read_task_id(data: bytes) -> str:
    """The id that :func:`write_task_id` wrote."""
    if data[:1] == b"\0":
        return str(UUID(bytes=data[1:]))
    return data.removeprefix(b"\1").decode()
