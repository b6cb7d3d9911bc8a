"""Large payloads in one of Celery's key-value backends, outside Redis."""

from __future__ import annotations

import os
import threading
from base64 import b64decode, b64encode
from math import ceil
from typing import Any

from celery import Celery
from celery.app.backends import by_url
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import ImproperlyConfigured

from celery_idempotent.errors import SettingsError

#: Before data that is no ASCII: every backend takes text, some make text of all they are given.
_BASE64 = "base64:"


class BackendOffloadStorage:
    """Objects by name in the backend that a URL names: ``file://``, ``s3://``, ``gs://`` …

    The backend is opened in the process and thread that need it: clients in there are seldom made
    for several threads, and never for both sides of a fork.
    """

    def __init__(self, app: Celery, url: str) -> None:
        self._app = app
        self._url = url
        self._opened = threading.local()

    def put(self, name: str, data: bytes, seconds: float) -> None:
        """Keep `data` under `name`; whatever the backend raises comes out.

        `seconds` is told to the backend as its ``expires``; some go by it, most do not.
        """
        backend = self._open(ceil(seconds))
        backend.set(backend.key_t(name), _as_text(data))

    def get(self, name: str) -> bytes | None:
        """The data under `name`, or None if there is none any more."""
        backend = self._open()
        data = backend.get(backend.key_t(name))
        return None if data is None else _from_text(data)

    def delete(self, name: str) -> None:
        """Forget `name`."""
        backend = self._open()
        backend.delete(backend.key_t(name))

    def _open(self, seconds: int | None = None) -> Any:
        opened: dict[Any, Any] = vars(self._opened)
        context = os.getpid(), seconds
        if context not in opened:
            backend, url = by_url(self._url, self._app.loader)
            opened[context] = backend(app=self._app, url=url, expires=seconds)
        return opened[context]


def _as_text(data: bytes) -> str:
    if data.isascii() and not data.startswith(_BASE64.encode()):
        return data.decode("ascii")
    return _BASE64 + b64encode(data).decode()


def _from_text(data: bytes | str) -> bytes:
    text = data.encode() if isinstance(data, str) else bytes(data)
    mark = _BASE64.encode()
    if not text.startswith(mark):
        return text
    try:
        return b64decode(text[len(mark) :], validate=True)
    except ValueError:
        return text  # damage, which the reader will find out and tell


def check(app: Celery, url: str) -> None:
    """Refuse a URL that names no key-value backend.

    Raises:
        SettingsError: naming the scheme, never the URL, which may hold a password.
    """
    scheme, separator, _ = url.partition("://")
    try:
        backend, _ = by_url(url if separator else "", app.loader)
    except (ImproperlyConfigured, ImportError):
        backend = None
    if not (isinstance(backend, type) and issubclass(backend, KeyValueStoreBackend)):
        found = f"the scheme {scheme!r}" if separator else "no scheme"
        raise SettingsError(
            f"idempotency_offload_backend has {found}; it must be the URL of a key-value backend "
            "of Celery"
        )
