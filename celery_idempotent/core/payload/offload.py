"""Stores payloads that are too large for a record: the record then holds the name of an object.

The objects are in one of Celery's key-value backends.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from base64 import b64decode, b64encode, urlsafe_b64encode
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from celery.app.backends import by_url
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import ImproperlyConfigured

from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.key.canonical import digest
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record.payload import OFFLOADED, RESULT, Payload, subject
from celery_idempotent.errors import (
    CorruptRecordError,
    ResultNotStoredError,
    SettingsError,
    StoreUnavailableError,
)

logger = logging.getLogger(__name__)

#: Marks data that is not ASCII: every backend accepts text, some convert everything to text.
_BASE64 = "base64:"


class OffloadStorage:
    """Stores objects by name in the backend that a URL names: ``file://``, ``s3://``, ``gs://`` …

    Its methods may block, and raise any error.

    Each process and thread opens its own backend: few clients can be shared by threads, and none
    across a fork.
    """

    def __init__(self, app: Celery, url: str) -> None:
        self._app = app
        self._url = url
        self._local = threading.local()

    def put(self, name: str, data: bytes, seconds: float) -> None:
        """Stores `data` under `name`; errors of the backend are raised unchanged.

        `seconds` becomes the backend's ``expires``, which most backends ignore.
        """
        backend = self._backend(ceil(seconds))
        backend.set(backend.key_t(name), _to_text(data))

    def get(self, name: str) -> bytes | None:
        """Returns the data under `name`, or None if there is none."""
        backend = self._backend()
        data = backend.get(backend.key_t(name))
        return None if data is None else _from_text(data)

    def delete(self, name: str) -> None:
        """Deletes `name`."""
        backend = self._backend()
        backend.delete(backend.key_t(name))

    def _backend(self, seconds: int | None = None) -> Any:
        backends: dict[Any, Any] = vars(self._local)
        process_and_expiry = os.getpid(), seconds
        if process_and_expiry not in backends:
            backend, url = by_url(self._url, self._app.loader)
            backends[process_and_expiry] = backend(app=self._app, url=url, expires=seconds)
        return backends[process_and_expiry]


def _to_text(data: bytes) -> str:
    if data.isascii() and not data.startswith(_BASE64.encode()):
        return data.decode("ascii")
    return _BASE64 + b64encode(data).decode()


def _from_text(data: bytes | str) -> bytes:
    text = data.encode() if isinstance(data, str) else bytes(data)
    prefix = _BASE64.encode()
    if not text.startswith(prefix):
        return text
    try:
        return b64decode(text[len(prefix) :], validate=True)
    except ValueError:
        return text  # damaged: decoding the payload will fail


def check(app: Celery, url: str) -> None:
    """Rejects a URL that does not name a key-value backend, or whose password is not escaped.

    Raises:
        SettingsError: naming the scheme, never the URL, which may hold a password.
    """
    scheme, separator, _ = url.partition("://")
    try:
        backend, _ = by_url(url if separator else "", app.loader)
    except (ImproperlyConfigured, ImportError):
        backend = None
    if not (isinstance(backend, type) and issubclass(backend, BaseKeyValueStoreBackend)):
        given = f"the scheme {scheme!r}" if separator else "no scheme"
        raise SettingsError(
            f"idempotency_offload_backend has {given}; set it to the URL of one of Celery's "
            "key-value backends, such as file:///var/lib/results or s3://bucket"
        )
    try:
        address = urlsplit(url).netloc
        # The address ends at a "#", "/" or "?". If the password is there, its begin is the port.
        is_cut = ":" in address and "@" in url and "@" not in address
    except ValueError:
        is_cut = True
    if is_cut:
        raise SettingsError(
            "idempotency_offload_backend has an unescaped character in its user or password: use "
            "urllib.parse.quote(password, safe='')"
        )


def put(
    storage: OffloadStorage, payload: Payload, key: str, token: int, field: str, seconds: float
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


def get(storage: OffloadStorage | None, payload: Payload, key: str, field: str) -> Payload:
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


def delete(storage: OffloadStorage, payload: Payload, key: str, field: str) -> None:
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
