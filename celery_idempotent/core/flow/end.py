"""Values of the flow: admissions (replies to a begin), settlements, and ends of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from celery_idempotent.core.flow.call import Disposition
from celery_idempotent.core.flow.outcome import Failure, Outcome
from celery_idempotent.core.key.key import Key
from celery_idempotent.core.record.payload import Payload
from celery_idempotent.core.record.record import Record
from celery_idempotent.core.store.commands import BackendResult
from celery_idempotent.core.store.scripts import Reply


class Answer(NamedTuple):
    """The call has an outcome."""

    outcome: Outcome
    #: The source of a replay, or the record that has kept the call from running.
    record: Record | None = None
    replayed: bool = False
    #: Whether the outcome is an error of the flow instead of an execution's.
    refused: bool = False
    #: Whether the outcome is that of the call's own execution, and stored.
    is_own: bool = False
    #: Whether the continuation was sent before.
    continuation_sent: bool = False
    #: Whether the result backend has the value.
    result_written: bool = False


class Requeue(NamedTuple):
    """The call has to be delivered again."""

    seconds: float
    reason: BaseException
    #: As in `Call`, for the next delivery.
    rollback_count: int
    #: The record that has kept the call from running.
    record: Record | None = None
    #: Seconds instead of `seconds` if something delivers the call as soon as `record` ends; 0 if
    #: nothing can know when to deliver it.
    fallback: float = 0.0


class Drop(NamedTuple):
    """The call ends without an outcome."""

    record: Record


class Reject(NamedTuple):
    """The message goes to the broker's dead letter queue."""

    reason: str
    record: Record


#: How a call ends. Its caller carries that out.
End = Answer | Requeue | Drop | Reject


@dataclass(frozen=True, slots=True)
class Granted:
    """The call may run."""


@dataclass(frozen=True, slots=True)
class Again:
    """Another begin is needed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The key has an outcome."""

    record: Record
    #: Whether this delivery has the right to send the continuation of its message.
    sends: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Another execution or message holds the key."""

    record: Record
    reply: Reply
    #: Of the record in the reply.
    key: Key


GRANTED, AGAIN = Granted(), Again()

#: The result of a begin.
Admission = Granted | Again | Finished | Held | End


@dataclass(slots=True)
class Settlement:
    """The end of an execution: the payload to store, and the outcome for its caller."""

    disposition: Disposition
    outcome: Outcome
    payload: Payload | None = None
    #: The field of the record for an encoded value; empty if the payload is none.
    field: str = ""
    retention_ms: int = 0
    #: These two as for `commands.complete`.
    backend_result: BackendResult | None = None
    sending_ms: int = 0
    #: The outcome counts, regardless of the reply of Redis; a later call can store it.
    committed: bool = False

    @property
    def error(self) -> BaseException | None:
        """The error that the body raised."""
        return self.outcome.error if isinstance(self.outcome, Failure) else None
