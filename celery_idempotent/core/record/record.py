"""The record of a key, decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from celery_idempotent.errors import NotReadyError


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

    #: End of the lease (STARTED), of the reservation (RESERVED), or of the time for sending; else
    #: when the outcome was stored. Milliseconds.
    at_ms: int = field(default=0, repr=False)
    #: Deadline for one delivery to send callbacks, the rest of a chain or a chord's count;
    #: milliseconds. 0: they were sent, or there are none.
    sending_until_ms: int = field(default=0, repr=False)
    fingerprint: bytes = field(default=b"", repr=False)
    #: A readable name of the call, from ``idempotency_label``; else empty.
    label: str = field(default="", repr=False)
    #: Encoding of `body` (serializer, compression); empty if no value is stored.
    format: str = field(default="", repr=False)
    #: The W3C traceparent of the execution that stored the outcome; empty without tracing.
    traceparent: str = field(default="", repr=False)
    #: The encoded outcome, or why no value is stored; before the outcome, the finished steps.
    body: bytes = field(default=b"", repr=False)
    #: The first generation of the message that continues: its retry, or after a replacement.
    awaited: int = field(default=0, repr=False)
    #: How the execution of a STARTED record ended; None if it runs, or its end was not seen.
    #: ``hard_time_limit``, ``process_lost`` or ``terminated``: the worker's main process ended its
    #: lease. ``process_exit``: the body ended its process.
    ended_by: str | None = field(default=None, repr=False)
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
