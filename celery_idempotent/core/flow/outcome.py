"""The outcome of a body, as a value: the flow passes errors on without raising them.

The first caller of a function gets the value that every duplicate will get: see :func:`restored`.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded

from celery_idempotent.core.payload.codec import NOT_STORED, not_stored
from celery_idempotent.core.payload.value_codec import ValueCodec
from celery_idempotent.core.record.payload import RESULT, Payload, step_field
from celery_idempotent.errors import LeaseLostError, SettingsError
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

#: After these, a database connection is closed: its driver may have sent a statement and not read
#: the reply.
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
    """Returns the payload of `value`, and the outcome for the caller, as the payload restores it.

    With ``store_result=False``, a result is returned as it is. A value that cannot be serialized
    and restored is a failure that names the types and the serializer.

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
    remedy = "return plain types, or set another idempotency_serializer"
    if field == RESULT:
        remedy += ", or idempotency_store_result=False"
    error.args = (f"{error}; {remedy}",)
    return payload, Failure(error)


def restore_step(settings: Settings, values: ValueCodec, key: str, name: str, value: Any) -> Any:
    """Returns the value of a step in an execution without a record: the same as with one."""
    _, outcome = restored(value, settings, values, key=key, field=step_field(name))
    return outcome.get()
