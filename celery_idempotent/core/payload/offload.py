"""Stores payloads that are too large for a record in ``idempotency_offload_backend``.

The record then holds the name of the object. Its key, token and field make the name, so no two
executions write the same object.
"""

from __future__ import annotations

import logging
import re
from base64 import urlsafe_b64encode
from dataclasses import replace
from typing import Any

from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.key.canonical import digest
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import ERROR, OFFLOADED, RESULT, Payload, Record, State, subject
from celery_idempotent.errors import (
    CorruptRecordError,
    ResultNotStoredError,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)


def put(
    storage: Any, payload: Payload, key: str, token: int, field: str, seconds: float
) -> Payload:
    """Stores the body of `payload` and returns what the record holds in its place. Never raises."""
    name = f"{key}:{token}{_suffix(field)}"
    try:
        storage.put(name, payload.body, seconds)
    except Exception:
        logger.exception(
            "idempotency_offload_backend could not store the %s %s",
            one_line(field),
            name,
            extra=log_extra(key, token=token),
        )
        return Payload("", b"idempotency_offload_backend could not store it")
    return Payload(OFFLOADED + payload.format, name.encode())


def get(storage: Any, payload: Payload, key: str, field: str) -> Payload:
    """Returns the payload that :func:`put` stored.

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


def read(storage: Any, record: Record) -> Record:
    """Returns `record` with its outcome in place of the object's name; raises as :func:`get`."""
    field = ERROR if record.state is State.FAILED else RESULT
    payload = get(storage, Payload(record.format, record.body), record.key, field)
    return replace(record, format=payload.format, body=payload.body)


def delete(storage: Any, payload: Payload, key: str, field: str) -> None:
    """Deletes the object of `payload`. Never raises."""
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


def _checked_name(body: bytes, key: str, field: str) -> str:
    """Returns the object's name in `body`.

    Raises:
        CorruptRecordError: if :func:`put` cannot have written it: a client that can write to
            Redis must not be able to choose which object is read or deleted.
    """
    name = body.decode(errors="replace")
    pattern = rf"{re.escape(key)}:\d{{1,20}}{re.escape(_suffix(field))}"
    if not re.fullmatch(pattern, name, re.ASCII):
        raise CorruptRecordError(
            f"the {field} of {key} names an object that is not its own in "
            "idempotency_offload_backend; forget the key to start afresh"
        )
    return name


def _suffix(field: str) -> str:
    """Returns the end of an object's name: a digest, as a step's name may hold any character."""
    if field == RESULT:
        return ""
    return ":" + urlsafe_b64encode(digest(field.encode("utf-8", "surrogatepass"), 9)).decode()
