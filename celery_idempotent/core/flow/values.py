"""Values of the flow: outcomes of bodies, settlements, admissions, ends.

A body ends in an *outcome*. The host makes a *settlement* of it: what that means for the key. The
reply to a begin becomes an *admission*: whether the call may run. A call ends in an *end*, which
its caller carries out. Errors are values too, which the flow passes on without raising them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded

from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.codec import NOT_STORED, not_stored
from celery_idempotent.core.payload.value_codec import ValueCodec
from celery_idempotent.core.record import RESULT, Payload, Record, step_field
from celery_idempotent.core.store.commands import BackendResult
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import IdempotencyError, LeaseLostError, SettingsError
from celery_idempotent.settings import Settings


class Result(NamedTuple):
    """The body returned."""

    value: Any

    def get(self) -> Any:
        """Returns the value."""
        return self.value


class Failure(NamedTuple):
    """The body raised."""

    error: BaseException

    def get(self) -> Any:
        """Raises the error."""
        try:
            raise self.error
        finally:
            # The error's traceback refers to this frame, which would refer to the error.
            del self


Outcome = Result | Failure
NO_VALUE = Result(None)

#: Errors that a heartbeat or a signal handler may raise anywhere in a body. After one, a database
#: connection is closed: its driver may have sent a statement and not read the reply.
_ASYNCHRONOUS_ERRORS = (LeaseLostError, SoftTimeLimitExceeded)


def is_asynchronous(error: BaseException) -> bool:
    """Returns whether `error` may have been raised in the middle of a statement."""
    return isinstance(error, _ASYNCHRONOUS_ERRORS) or not isinstance(error, Exception)


def that_has_run(value: Any, of: str, advice: str) -> Any:
    """Returns the value of the function `of`, unless its code has not run.

    Raises:
        SettingsError: for a coroutine or another awaitable, and for a generator.
    """
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value):
            value.close()
        raise SettingsError(
            f"{of} returned a {type(value).__name__}, whose code has not run; {advice}"
        )
    return value


def step_that_has_run(name: str, value: Any) -> Any:
    """As :func:`that_has_run`, for the step `name`."""
    advice = "pass a function that runs to its end, such as one that calls asyncio.run()"
    return that_has_run(value, f"step {name!r}", advice)


def restored(
    value: Any, settings: Settings, values: ValueCodec, *, key: str, field: str = RESULT
) -> tuple[Payload, Outcome]:
    """Returns the payload of `value`, and for the caller, the value as restored from the payload.

    The first caller of a function thus gets an equal value as every duplicate. With
    ``store_result=False``, a result is returned as it is. A value that cannot be serialized and
    restored is a failure that names the types and the serializer.

    Args:
        key: of the record, or the function's name; for the error.
        field: the field of the record for the payload.
    """
    if field == RESULT and not settings.store_result:
        return Payload("", NOT_STORED), Result(value)
    payload, value = values.round_trip(value, settings)
    if payload.format:
        return payload, Result(value)
    error = not_stored(payload, key, field)
    remedy = "return plain types, or set another serializer"
    if field == RESULT:
        remedy += ", or idempotency_store_result=False"
    error.args = (f"{error}; {remedy}",)
    return payload, Failure(error)


def restore_step(settings: Settings, values: ValueCodec, key: str, name: str, value: Any) -> Any:
    """Returns the value of a step in an execution without a record: the same as with one."""
    _, outcome = restored(value, settings, values, key=key, field=step_field(name))
    return outcome.get()


@dataclass(slots=True)
class Settlement:
    """What the end of an execution means for its key: one of the subclasses."""

    #: What the caller gets.
    outcome: Outcome = NO_VALUE
    #: What the record gets; `flow.settlement_of` sets it.
    payload: Payload | None = None
    #: RESULT or ERROR, if the payload is an encoded value; else empty.
    field: str = ""
    #: How long the record is kept.
    retention_ms: int = 0
    #: Whether a database has committed the outcome. It then counts even if Redis cannot store it: a
    #: later call copies it from there.
    committed: bool = False

    @property
    def error(self) -> BaseException | None:
        """The error that the body raised."""
        return self.outcome.error if isinstance(self.outcome, Failure) else None


@dataclass(slots=True)
class Complete(Settlement):
    """The value is the outcome of the key."""

    #: Whether this delivery sends the continuation of the call.
    continues: bool = False
    #: The result for Celery's result backend, if the script is to write it with the outcome.
    backend_result: BackendResult | None = None


@dataclass(slots=True)
class Release(Settlement):
    """The key is free, or reserved for a retry of the message."""

    #: Seconds for which the key stays reserved; 0 frees it at once.
    hold: float = 0.0
    #: Generation of the retry that the key is reserved for. A message with a lower one is a copy of
    #: an earlier message.
    awaited: int = 0
    #: Whether the execution counts as one that died, for ``max_attempts``.
    died: bool = False


@dataclass(slots=True)
class Fail(Settlement):
    """The error is the outcome of the key; every duplicate gets it."""


@dataclass(slots=True)
class Delegate(Settlement):
    """Another task has replaced this one under its id; the other's result is the outcome."""

    #: Lowest generation of a message with the task's id that may go on under the key.
    awaited: int = 0
    #: False if the other task ignores its result.
    stores_result: bool = True


class Answer(NamedTuple):
    """The call has an outcome."""

    outcome: Outcome
    #: The record whose outcome is replayed, or that has kept the call from running.
    record: Record | None = None
    #: Whether the outcome is that of `record`.
    replayed: bool = False
    #: Whether the outcome is an error that refuses the call, not the error of an execution.
    refused: bool = False
    #: Whether the outcome is that of the call's own execution, and stored.
    is_own: bool = False
    #: Whether the continuation of this message was sent before, so that Celery must not send it.
    continuation_sent: bool = False
    #: Whether the script has written the result for the result backend.
    result_written: bool = False
    #: Why the record lacks the outcome, or its value, of the call's own execution.
    unsaved: IdempotencyError | None = None
    #: What became of a duplicate that got no replay: a letter of `conflict.BECAME`, as in each end.
    became: str = "c"


class PutBack(NamedTuple):
    """The call has to be delivered again. A caller without messages raises `reason`."""

    #: Seconds until the next delivery.
    seconds: float
    #: Why the call cannot run now.
    reason: BaseException
    #: How many deliveries of the message, this one included, have ended in a rollback by the
    #: database: the next delivery gets it in its `CallData`.
    rollback_count: int
    #: The record that has kept the call from running; None if there is none.
    record: Record | None = None
    #: Seconds until the next delivery if :mod:`celery_idempotent.waking` is to wake the message
    #: when `record` ends, and does not; 0 if nothing can wake it.
    fallback: float = 0.0
    became: str = "w"


class Drop(NamedTuple):
    """The call ends without an outcome: its message is acknowledged."""

    record: Record
    became: str = "i"


class Reject(NamedTuple):
    """The message is rejected, and goes to the broker's dead-letter queue."""

    reason: str
    record: Record
    became: str = "d"


#: How a call ends. Its caller carries that out.
End = Answer | PutBack | Drop | Reject


class Proceed(Enum):
    """What follows a begin without a record to answer with."""

    #: The call may run: it has a grant.
    GRANTED = 1
    #: Another begin is needed, at once.
    AGAIN = 2


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
    #: The reply to the begin, which has the record's bytes and the server's time.
    reply: Reply
    #: The key of `record`: of a key that may run again, that of another message.
    key: Key


GRANTED, AGAIN = Proceed

#: What follows from a begin: the call may run, begins again, gets an outcome, or ends in another
#: way.
Admission = Proceed | Finished | Held | End
