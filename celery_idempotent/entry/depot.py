"""Large results in one of Celery's key-value backends, outside Redis."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.backends import by_url
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import ImproperlyConfigured

from celery_idempotent.errors import SettingsError


class BackendDepot:
    """Objects by name in the backend that a URL names: ``file://``, ``s3://``, ``gs://`` …

    The backend is opened in the process that first needs it, never before a fork.
    """

    def __init__(self, app: Celery, url: str) -> None:
        self._app = app
        self._url = url
        self._backend: Any = None

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` under `name`; whatever the backend raises comes out."""
        self._open().set(name.encode(), data)

    def get(self, name: str) -> bytes | None:
        """The data under `name`, or None if there is none any more."""
        data = self._open().get(name.encode())
        return data.encode() if isinstance(data, str) else data

    def _open(self) -> Any:
        if self._backend is None:
            backend, url = by_url(self._url, self._app.loader)
            self._backend = backend(app=self._app, url=url)
        return self._backend


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
