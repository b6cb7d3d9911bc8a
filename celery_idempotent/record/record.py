"""A record, read back for people and for the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from celery_idempotent.errors import NotReadyError


class State(str, Enum):
    """Where a key stands; a key without a record is absent."""

    RESERVED = "RESERVED"
    STARTED = "STARTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    @property
    def finished(self) -> bool:
        """Whether there is an outcome."""
        return self in (State.COMPLETED, State.FAILED)


@dataclass(frozen=True, slots=True)
class Record:
    """What Redis holds for a key. All times are the Redis server's, in UTC."""

    state: State
    #: ``task:digest``; the name in Redis is this behind the prefix.
    key: str
    #: Name of the task.
    task: str
    #: Id of the task whose execution holds the key, or ended it.
    task_id: str
    #: ``nodename/pid`` of the process that ran it; empty while RESERVED.
    worker: str
    #: Fencing token: a number that only grows for a key.
    token: int
    #: How many executions have begun in a row since the last one that was released.
    attempt: int
    #: When Redis forgets the record; known to a look-up, not to the gate.
    expires_at: datetime | None = None

    #: STARTED: end of the lease. RESERVED: end of the reservation. Else: the end. Milliseconds.
    at_ms: int = field(default=0, repr=False)
    #: Whether callbacks, the rest of a chain or a chord's count have gone out already.
    continuation_sent: bool = field(default=False, repr=False)
    fingerprint: bytes = field(default=b"", repr=False)
    #: How `body` was written (serializer, compression); empty where no value is kept.
    format: str = field(default="", repr=False)
    #: The trace that the outcome comes from (a W3C traceparent); empty where nobody traces.
    traceparent: str = field(default="", repr=False)
    #: The outcome as stored, or why there is none; while there is none, the finished steps.
    body: bytes = field(default=b"", repr=False)
    decode: Callable[[Record], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def started_at(self) -> datetime | None:
        """When the last execution began, as its token tells; None while RESERVED.

        After a backward step of the server's clock the token, which must not fall, tells later.
        """
        return None if self.state is State.RESERVED else _moment(self.token / 1e6)

    @property
    def finished_at(self) -> datetime | None:
        """When the outcome was stored; None while there is none."""
        return _moment(self.at_ms / 1e3) if self.state.finished else None

    @property
    def deadline(self) -> datetime | None:
        """When the lease (STARTED) or the reservation (RESERVED) ends; None once finished."""
        return None if self.state.finished else _moment(self.at_ms / 1e3)

    @property
    def result(self) -> Any:
        """The stored value, or for FAILED the exception; None while there is no outcome.

        Raises:
            ResultNotStoredError: if the key completed and its value was not kept.
            CorruptRecordError: if the stored value cannot be read.
        """
        try:
            return self.outcome()
        except NotReadyError:
            return None

    def outcome(self) -> Any:
        """As `result`, but tells an outcome that is yet to come from None.

        Raises:
            NotReadyError: if it is the result of a task that has not ended.
        """
        if not self.state.finished or self.decode is None:
            return None
        return self.decode(self)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
