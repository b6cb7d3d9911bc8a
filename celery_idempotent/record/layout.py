"""The byte layout of a record. lua/layout.lua has the same fields.

===========  =====  ==========================================================================
field        bytes  content
===========  =====  ==========================================================================
letter           1  R, S, C, F, P or Q: the state; newer layouts use other letters
attempt          1
token            7  big-endian
at_ms            6  big-endian, milliseconds
fingerprint    1 +  length, then 8 bytes (zeros: none) and the label in UTF-8; empty: neither
task_id        2 +  length, then bytes; a UUID is a zero byte and its 16 bytes
worker         1 +  length, then UTF-8
owner          1 +  length, then, if STARTED: the root of the message (8 bytes) and the execution id
                    (8); if RESERVED: the root and, in decimal, the generation of the first message
                    that it is reserved for (empty: any; "-": none); for an outcome with a
                    continuation, or of a key that may run again: the root, and the id of the
                    delivery that ran, or sends the continuation; P and Q: also the deadline (6, ms)
format         1 +  length, then ASCII: the encoding of the body, see payload/codec.py, then a
                    space and the traceparent of the outcome; if STARTED by a takeover: for how
                    many milliseconds the key was orphaned; if abandoned: how the execution ended;
                    if STARTED, or RESERVED for a retry, then a comma and the time in milliseconds
                    until which the outcome is kept for calls that met an execution
body          rest  the outcome, or the reason why no value is stored; before the outcome, the
                    finished steps, see record/steps.py
===========  =====  ==========================================================================

P and Q are C and F while the continuation of the task is being sent.

The entry of a message, stored beside the record, has the same layout, with the generation of the
message in place of the token. Its name ends with the message's root. F and Q are an error that
ended the message but not the key. C and P, without an outcome, mean that a duplicate has sent or is
sending its own continuation. When a message is published again under its task id, the outcome that
it replaces becomes an entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from celery_idempotent.printable import printable
from celery_idempotent.record.record import Record, State

#: Covers everything that two releases exchange through Redis, messages and databases.
#: Incremented when the previous release cannot read what this one writes: docs/upgrading.md.
VERSION = 2

_STATES = {
    ord("R"): State.RESERVED,
    ord("S"): State.STARTED,
    ord("C"): State.COMPLETED,
    ord("P"): State.COMPLETED,
    ord("F"): State.FAILED,
    ord("Q"): State.FAILED,
}
#: Letters of outcomes whose continuation is being sent.
_SENDING = b"PQ"
#: Bytes of a root, and of an execution id.
ID_BYTES = 8
#: Bytes of the owner of an outcome whose continuation is being sent.
_SENDING_OWNER = 2 * ID_BYTES + 6
#: Owner of a RESERVED record that is reserved for no message.
NOBODY = b"-"
#: Bytes before the first field of variable length.
_FIXED = 15
#: One less than the length field allows, since some ids are stored with an extra leading byte.
_MAX_TASK_ID = 2**16 - 2
#: As `str` formats a UUID; `UUID` would also accept other forms.
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_FINGERPRINT_BYTES = 8
#: Body of a FAILED record whose executions died ``idempotency_max_attempts`` times in a row.
_POISONED = b"poisoned"
#: In place of a fingerprint, before a label.
_NO_FINGERPRINT = bytes(_FINGERPRINT_BYTES)
#: Later times (year 6429) mean damage.
_MAX_MS = 2**47


#: Letter, attempt, token, at_ms, fingerprint, task_id, worker, owner, format, body; undecoded.
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


def head_size(raw: bytes) -> int:
    """Returns how many bytes precede the body; at least so many, if `raw` is cut short."""
    try:
        end = _FIXED + 1 + raw[_FIXED] + 2
        end += int.from_bytes(raw[end - 2 : end], "big")
    except IndexError:
        return len(raw)  # damaged
    for left in (3, 2, 1):  # the fields after the task id, of up to 255 bytes
        if end >= len(raw):
            return end + left * 256
        end += 1 + raw[end]
    return end


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
        letter, attempt, token, at_ms, fingerprint, task_id, worker, owner, form, body = _unpack(
            raw
        )
        is_sending = letter in _SENDING
        if at_ms >= _MAX_MS or (is_sending and len(owner) != _SENDING_OWNER):
            raise ValueError(at_ms)
        encoding, _, traceparent = form.partition(b" ")
        if letter in b"RS":
            encoding = encoding.partition(b",")[0]
        return Record(
            state=_STATES[letter],
            key=key,
            task=task,
            task_id=read_task_id(task_id),
            worker=worker.decode(),
            token=token,
            attempt=attempt,
            sending_until_ms=int.from_bytes(owner[-6:], "big") if is_sending else 0,
            at_ms=at_ms,
            fingerprint=fingerprint[:_FINGERPRINT_BYTES].removeprefix(_NO_FINGERPRINT),
            label=_read_label(fingerprint) if len(fingerprint) > _FINGERPRINT_BYTES else "",
            format=encoding.decode("ascii"),
            traceparent=traceparent.decode("ascii"),
            body=body,
            decode=decode,
            expires_at=expires_at,
        )
    except (IndexError, KeyError, ValueError):
        raise corrupt(key) from None


def write_fingerprint(fingerprint: bytes, label: str) -> bytes:
    """Returns the field of a fingerprint and a label that :func:`printable` returned."""
    return (fingerprint or _NO_FINGERPRINT) + label.encode() if label else fingerprint


def _read_label(field: bytes) -> str:
    # Escaped again, since other programs can write to Redis.
    return printable(field[_FINGERPRINT_BYTES:].decode(errors="replace"))


def is_absent(raw: bytes) -> bool:
    """Whether `raw` holds only the attempts of an execution whose message has ended."""
    try:
        owner, body = _unpack(raw)[7::2]
    except IndexError:
        return False
    return raw[:1] == b"R" and owner == NOBODY and not body


def owner(raw: bytes) -> bytes:
    """Returns the owner of a record that :func:`read` accepts."""
    return _unpack(raw)[7]


def is_abandoned(raw: bytes, token: int, worker: str) -> bool:
    """Whether lua/abandon.lua ended the execution with `token` and none has begun since."""
    try:
        _, _, stored_token, _, _, _, stored_worker, owner, _, _ = _unpack(raw)
    except IndexError:
        return False
    return (
        stored_token == token + 1
        and owner in (b"", NOBODY)
        and stored_worker.decode(errors="replace") == worker
    )


class Begun(NamedTuple):
    """The fields of a STARTED record that its execution needs."""

    token: int
    attempt: int
    #: The steps that earlier executions finished.
    body: bytes
    #: Seconds between the end of the previous lease and this takeover; 0 if it is not a takeover.
    orphaned_seconds: float = 0.0


def begun(raw: bytes) -> Begun:
    """Returns what an execution needs from the record in the reply to its begin."""
    _, attempt, token, _, _, _, _, _, orphaned_ms, body = _unpack(raw)
    orphaned_seconds = int(orphaned_ms.partition(b",")[0] or b"0") / 1000
    return Begun(token, attempt, body, orphaned_seconds)


def write_replacement(generation: int, task_id: str, steps: bytes) -> bytes:
    """Returns the body of a COMPLETED record whose task replaced itself.

    Args:
        generation: of the first message with the task's id that continues under the key.
        task_id: of the task whose result is the outcome.
        steps: the finished steps, for that message.
    """
    encoded = write_task_id(task_id)
    return generation.to_bytes(7, "big") + len(encoded).to_bytes(2, "big") + encoded + steps


def read_replacement(body: bytes, key: str) -> str:
    """Returns the id of the task whose result is the outcome.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    end = 9 + int.from_bytes(body[7:9], "big")
    if not 9 < end <= len(body):
        raise corrupt(key)
    return read_task_id(body[9:end])


def read_awaited(body: bytes) -> int:
    """Returns the generation of the first message that continues under the key."""
    return int.from_bytes(body[:7], "big")


def is_poisoned(record: Record) -> bool:
    """Whether the outcome of `record` is that its executions died, not an error of a body."""
    return record.state is State.FAILED and not record.format and record.body == _POISONED


def corrupt(key: str) -> CorruptRecordError:
    """Returns the error for a record that cannot be read."""
    return CorruptRecordError(
        f"the record of {key} cannot be read: it is damaged, of another kind, or written by a "
        "newer version; forget the key to start afresh"
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
