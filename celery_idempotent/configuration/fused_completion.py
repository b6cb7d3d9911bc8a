"""Whether the script that completes a record may write the task's result for the result backend.

Celery's Redis backend writes a result in two round trips of its own. If it uses the same Redis as
the record, under the same user, one script does all of it.
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
    """Returns why the results of `task` are written by Celery alone; empty if they need not be."""
    if not settings.fused_completion:
        return "idempotency_fused_completion is off"
    if task.ignore_result:
        return "its result is not kept (ignore_result)"
    if settings.wait_replicas:
        return "outcomes wait for replicas or the disk"
    if task._replaces_backend:  # noqa: SLF001
        return "its class has a backend of its own"
    backend = app.tasks[task.name].backend
    kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
    if kind != _BACKEND:
        return f"the result backend is not Celery's RedisBackend, but {type(backend).__qualname__}"
    # A client of the user, Sentinels and the nodes of a cluster have no address to compare.
    if not names_one_server(store.config.url):
        return "the records are not on a single server with a URL"
    if _identity(backend.connparams) != _identity(store.client.get_connection_kwargs()):
        return "the records are on another server or database, or of another user, than the results"
    return ""


def _identity(parameters: Mapping[str, Any]) -> list[Any]:
    return [parameters.get(name) or default for name, default in _IDENTITY.items()]
