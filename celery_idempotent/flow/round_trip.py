"""The value that the first caller gets: the one that every duplicate will get."""

from __future__ import annotations

from typing import Any

from celery_idempotent.flow.outcome import Failure, Outcome, Result
from celery_idempotent.payload.codec import NOT_STORED, not_stored
from celery_idempotent.payload.fields import RESULT, step_field
from celery_idempotent.payload.value_codec import ValueCodec
from celery_idempotent.record.payload import Payload
from celery_idempotent.settings import Settings


def restored(
    value: Any, settings: Settings, values: ValueCodec, *, key: str, field: str = RESULT
) -> tuple[Payload, Outcome]:
    """The payload of `value`, and what the caller gets: the value that the payload restores.

    With ``store_result=False`` a result is returned as it is. A value that cannot be serialized and
    restored is a failure, which names the types and the serializer.

    Args:
        key: of the record, or the function's name; for the error.
        field: of the record that is to hold the payload.
    """
    if field == RESULT and not settings.store_result:
        return Payload("", NOT_STORED), Result(value)
    payload, value = values.round_trip(value, settings)
    if payload.has_value:
        return payload, Result(value)
    error = not_stored(payload, key, field)
    remedy = "return plain types, or set another idempotency_serializer"
    if field == RESULT:
        remedy += ", or idempotency_store_result=False"
    error.args = (f"{error}; {remedy}",)
    return payload, Failure(error)


def restore_step(settings: Settings, values: ValueCodec, key: str, name: str, value: Any) -> Any:
    """The value of a step of an execution without a record: the same as with one."""
    _, outcome = restored(value, settings, values, key=key, field=step_field(name))
    return outcome.get()
