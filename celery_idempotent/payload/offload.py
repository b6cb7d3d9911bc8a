"""Payloads that are too large for a record: the record holds the name of an object elsewhere."""

from __future__ import annotations

import logging
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterable

from celery_idempotent.errors import (
    CorruptRecordError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.events.report import log_extra
from celery_idempotent.key.canonical import digest
from celery_idempotent.payload.fields import RESULT, subject
from celery_idempotent.payload.offload_storage import OffloadStorage
from celery_idempotent.printable import one_line
from celery_idempotent.record.payload import OFFLOADED, Payload

logger = logging.getLogger(__name__)

TOO_LARGE = b"it is larger than idempotency_max_result_size"
NOT_OFFLOADED = b"idempotency_offload_backend could not store it"


def put(
    storage: OffloadStorage, payload: Payload, key: str, token: int, field: str, seconds: float
) -> Payload:
    """Stores the body of `payload` and returns what the record holds in its place. Never raises."""
    name = _object_name(key, token, field)
    try:
        storage.put(name, payload.body, seconds)
    except Exception:
        logger.exception(
            "idempotency_offload_backend could not store the %s %s",
            one_line(field),
            name,
            extra=log_extra(key, token=token),
        )
        return Payload("", NOT_OFFLOADED)
    return Payload(OFFLOADED + payload.format, name.encode())


def get(storage: OffloadStorage | None, payload: Payload, key: str, field: str) -> Payload:
    """Returns what :func:`put` was given.

    Raises:
        CorruptRecordError: if the record names an object that cannot be its own.
        ResultNotStoredError: if the object no longer exists, or no storage is configured.
        StoreUnavailableError: if the storage cannot be read.
    """
    name = _checked_name(payload.body, key, field)
    if storage is None:
        raise ResultNotStoredError(
            f"{subject(key, field)} was offloaded, and this process has no "
            f"idempotency_offload_backend to read it from: {name}"
        )
    try:
        body = storage.get(name)
    except Exception as error:
        raise StoreUnavailableError(
            f"idempotency_offload_backend cannot be read for the {field} of {key}: "
            f"{type(error).__name__}"
        ) from error
    if body is None:
        raise ResultNotStoredError(
            f"{subject(key, field)} is no longer in idempotency_offload_backend: {name}"
        )
    return Payload(payload.format.removeprefix(OFFLOADED), body)


def delete(storage: OffloadStorage, payloads: Iterable[tuple[Payload, str]], key: str) -> None:
    """Deletes the objects of `payloads`, each with its field. Never raises."""
    for payload, field in payloads:
        try:
            storage.delete(_checked_name(payload.body, key, field))
        except Exception as error:
            logger.warning(
                "%s: its %s could not be deleted from idempotency_offload_backend: %s",
                key,
                one_line(field),
                type(error).__name__,
                extra=log_extra(key),
            )


def _object_name(key: str, token: int, field: str) -> str:
    name = f"{key}:{token}"
    return name if field == RESULT else f"{name}:{_field_code(field)}"


def _checked_name(body: bytes, key: str, field: str) -> str:
    """Returns the object's name in `body`.

    Raises:
        CorruptRecordError: if :func:`put` cannot have written it: a client that can write to
            Redis must not be able to choose which object is read or deleted.
    """
    name = body.decode(errors="replace")
    end = "" if field == RESULT else f":{_field_code(field)}"
    if not re.fullmatch(rf"{re.escape(key)}:\d{{1,20}}{re.escape(end)}", name, re.ASCII):
        raise CorruptRecordError(
            f"the {field} of {key} names an object that is not its own in "
            "idempotency_offload_backend; forget the key to start afresh"
        )
    return name


def _field_code(field: str) -> str:
    """Returns a name of fixed length: the name of a step may hold any character."""
    return urlsafe_b64encode(digest(field.encode("utf-8", "surrogatepass"), 9)).decode()
