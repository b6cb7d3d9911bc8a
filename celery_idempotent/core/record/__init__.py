"""The record of a key, and the payloads that records hold, as values. No I/O.

`layout` describes and reads the bytes; `core.store` gets them from Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any, NamedTuple

from celery_idempotent.core.printable import printable
from celery_idempotent.errors import NotReadyError

#: Maximum bytes of a tail: its length is stored in one byte.
_MAX_TAIL = 255


class State(str, Enum):
    """The state of a key; a key without a record is absent."""

    RESERVED = "RESERVED"
    STARTED = "STARTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    def __init__(self, value: str) -> None:
        #: Whether the record holds an outcome.
        self.finished = value in ("COMPLETED", "FAILED")


class Tail(NamedTuple):
    """The part of a record that scripts copy without reading it: one line for each field.

    Readers ignore lines that a later version has added, so a new field goes to the end. `Record`
    has a field of the same name for each.
    """

    #: Encoding of the body (serializer, compression); empty if no value is stored.
    format: str = ""
    #: The W3C traceparent of the execution that stored the outcome; empty without tracing.
    traceparent: str = ""
    #: A readable name of the call, if its task has a template; else empty.
    label: str = ""

    def to_bytes(self) -> bytes:
        """Returns the lines without empty ones at the end; a label that does not fit is cut."""
        data = "\n".join(self).encode().rstrip(b"\n")
        if (excess := len(data) - _MAX_TAIL) <= 0:
            return data
        cut = self.label.encode()[:-excess].decode(errors="ignore")
        return self._replace(label=cut).to_bytes() if self.label else data[:_MAX_TAIL]

    @classmethod
    def from_bytes(cls, data: bytes) -> Tail:
        """Returns the tail that :meth:`to_bytes` wrote.

        It is escaped again, since other programs can write to Redis.
        """
        lines = data.decode(errors="replace").split("\n")
        return cls(*map(printable, lines[: len(cls._fields)]))


@dataclass(frozen=True, slots=True)
class Record:
    """What Redis holds for a key. All times are the Redis server's, in UTC."""

    state: State
    #: ``task:digest``, or ``task:~digest`` for an explicit key. In Redis, the prefix precedes it.
    key: str
    #: Name of the task.
    task: str
    #: Id of the task that holds the key, has it reserved, or stored its outcome.
    task_id: str
    #: ``nodename/pid`` of the process that ran it; empty while RESERVED for a message.
    worker: str
    #: Fencing token: a number that only grows for a key.
    token: int
    #: Executions begun since the last release; all but the last of them have died.
    attempt: int
    #: When Redis deletes the record; None if the expiry was not read.
    expires_at: datetime | None = None

    #: Milliseconds since the epoch: the end of the lease (STARTED), of the reservation (RESERVED)
    #: or of the time for sending the continuation; of any other outcome, when it was stored.
    at_ms: int = field(default=0, repr=False)
    #: Until when (milliseconds since the epoch) one delivery may send the continuation, while no
    #: other delivery sends it. 0: it was sent, or there is none.
    sending_until_ms: int = field(default=0, repr=False)
    fingerprint: bytes = field(default=b"", repr=False)
    #: This field and the next two are those of `Tail`.
    label: str = field(default="", repr=False)
    format: str = field(default="", repr=False)
    traceparent: str = field(default="", repr=False)
    #: The encoded outcome, or why no value is stored; before the outcome, the finished steps.
    body: bytes = field(default=b"", repr=False)
    #: The lowest generation (see lua/begin.lua) of a message that may go on under the key: of the
    #: retry or, after ``Task.replace``, of a later replacement by the same task. 0: none.
    awaited: int = field(default=0, repr=False)
    #: How the execution of a STARTED record ended; None if it runs, or its end was not seen.
    #: ``hard_time_limit``, ``process_lost`` or ``terminated``: the worker's main process ended its
    #: lease. ``process_exit``: the body ended its process.
    ended_by: str | None = field(default=None, repr=False)
    #: Decodes the body; given by the store that has read the record.
    decode: Callable[[Record], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def explicit(self) -> bool:
        """Whether the caller supplied the key; else the task's rule derived it."""
        return ":~" in self.key

    @property
    def started_at(self) -> datetime | None:
        """When the last execution began, derived from its token; None while RESERVED.

        Tokens never decrease, so this is too late after the server's clock is set back.
        """
        return None if self.state is State.RESERVED else utc(self.token / 1e6)

    @property
    def finished_at(self) -> datetime | None:
        """When the outcome was stored, or its continuation sent; None before that."""
        return utc(self.at_ms / 1e3) if self.state.finished and not self.sending else None

    @property
    def deadline(self) -> datetime | None:
        """When the lease (STARTED) or the reservation (RESERVED) ends; None once finished."""
        return None if self.state.finished else utc(self.at_ms / 1e3)

    @property
    def sending(self) -> bool:
        """Whether callbacks, the rest of a chain or a chord's count are being sent."""
        return self.sending_until_ms > 0

    @property
    def result(self) -> Any:
        """The stored value, or the stored exception if FAILED; None before there is an outcome.

        Raises:
            ResultNotStoredError, CorruptRecordError: if the value is not stored, or cannot be read.
            Exception: the error of the task that replaced this one.
        """
        try:
            return self.outcome()
        except NotReadyError:
            return None

    def outcome(self) -> Any:
        """Returns what `result` returns, but raises if the task replaced itself and still runs.

        Raises:
            NotReadyError: if the outcome is the result of another task that has not finished.
        """
        if not self.state.finished or self.decode is None:
            return None
        return self.decode(self)


def utc(seconds: float) -> datetime:
    """Returns the time that is `seconds` after the epoch."""
    return datetime.fromtimestamp(seconds, tz=timezone.utc)


#: Begins the format of a value that is stored outside Redis.
OFFLOADED = "@"

#: What a payload can be: the outcome of a record, the outbox in a row, a kept message, or the
#: newest arguments of a message. The name is shown in errors, and a payload may be bound to it.
RESULT, ERROR, OUTBOX, MESSAGE = "result", "error", "outbox", "message"
ARGUMENTS = "arguments"


class Payload(NamedTuple):
    """An encoded value, as a record stores it."""

    #: Serializer and compression, as in payload/codec.py; empty if no value is stored.
    format: str
    #: The value, the name of an offloaded object, or the reason why no value is stored.
    body: bytes

    def to_bytes(self) -> bytes:
        """Returns format and body in one value."""
        return self.format.encode() + b"\n" + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        """Returns the payload that :meth:`to_bytes` wrote."""
        form, _, body = data.partition(b"\n")
        return cls(form.decode(errors="replace"), body)


def step_field(name: str) -> str:
    """Returns the field that holds the value of a step."""
    return f"step {name!r}"


def message_field(task_id: str) -> str:
    """Returns the field that holds the message which is kept for a task id."""
    return f"{MESSAGE} {task_id!r}"


def subject(key: str, field: str) -> str:
    """Returns the subject of a sentence about a missing value."""
    kind = field.partition(" ")[0]
    verb = {RESULT: "completed", ERROR: "failed", MESSAGE: "ended"}.get(kind)
    if verb is None:
        return f"{field} of {key} has completed, but its value"
    return f"{key} has {verb}, but its {kind}"
