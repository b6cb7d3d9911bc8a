"""Offload: values that are too large for a record are in one of Celery's key-value backends."""

from __future__ import annotations

import os
import threading
from base64 import b64decode, b64encode
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from celery.app.backends import by_url
from celery.backends.base import BaseKeyValueStoreBackend
from celery.exceptions import ImproperlyConfigured

from celery_idempotent.core.flow.extension import Option
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import Settings

#: Precedes data that is not ASCII, as Base64: every backend accepts text, and some convert all to
#: text.
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
        # The address ends at the first "#", "/" or "?". If that is in the password, the part before
        # it looks like a port, and "@" is not in the address.
        is_cut = ":" in address and "@" in url and "@" not in address
    except ValueError:
        is_cut = True
    if is_cut:
        raise SettingsError(
            "idempotency_offload_backend has an unescaped character in its user or password: use "
            "urllib.parse.quote(password, safe='')"
        )


class Offload(Option):
    """The option ``idempotency_offload_backend``."""

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Checks the URL."""
        if app is None:
            raise SettingsError(
                "idempotency_offload_backend needs a Celery app: create Idempotency from the app "
                "instead of a URL or a client"
            )
        check(app, settings.offload_backend or "")
        return settings

    @classmethod
    def extend_codec(cls, codec: PayloadCodec, settings: Settings, app: Any) -> None:
        """Adds the storage."""
        codec.offload_storage = OffloadStorage(app, settings.offload_backend or "")

    @classmethod
    def summary(cls, settings: Settings) -> str:
        """Returns the kind of backend; its URL may hold a password."""
        return f"offload to {(settings.offload_backend or '').partition(':')[0]}"
