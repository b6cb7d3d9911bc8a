"""The first caller of a function gets the value that every duplicate will get."""

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
    """Returns the payload of `value`, and the outcome for the caller, which the payload restores.

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
