"""Decides whether the script that completes a record also writes the result backend's result.

Celery's Redis backend needs two round trips of its own to write a result. If it uses the same Redis
as the record, with the same user, one script does both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery, Task

from celery_idempotent.settings import Settings
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.url import names_one_server

#: The backend whose commands the script repeats; subclasses may write something else.
_BACKEND = "celery.backends.redis.RedisBackend"
#: What identifies a server, a database and a user among the parameters of a connection.
_IDENTITY = {
    "host": "localhost",
    "port": 6379,
    "path": None,
    "db": 0,
    "username": None,
    "password": None,
    "credential_provider": None,
}


def obstacle(task: type[Task], app: Celery, settings: Settings, store: RecordStore) -> str:
    """Returns the reason why Celery writes the results of `task`; empty if the script can."""
    if not settings.fused_completion:
        return "idempotency_fused_completion is off"
    if task.ignore_result:
        return "its result is not kept (ignore_result)"
    if settings.wait_replicas:
        return "outcomes wait for replicas"
    if task._replaces_backend:  # noqa: SLF001
        return "its class has a backend of its own"
    backend = app.tasks[task.name].backend
    kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
    if kind != _BACKEND:
        return f"the result backend is not Celery's RedisBackend, but {type(backend).__qualname__}"
    # A user's client, Sentinels and cluster nodes have no address to compare.
    if not names_one_server(store.config.url):
        return "the records are not on a single server with a URL"
    if _identity(backend.connparams) != _identity(store.client.get_connection_kwargs()):
        return "the records and the results use different servers, databases or users"
    return ""


def _identity(parameters: Mapping[str, Any]) -> list[Any]:
    return [parameters.get(name) or default for name, default in _IDENTITY.items()]
