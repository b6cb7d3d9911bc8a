"""The idempotent tasks of an app, and the stores of their records."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from celery import Celery
from celery.utils.functional import firstmethod

from celery_idempotent.core.configuration.configuration import (
    TaskConfiguration,
    attributes_of,
    is_built_in,
)
from celery_idempotent.core.key import Key
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.server_info import distinct
from celery_idempotent.settings import PREFIX

_lock = threading.Lock()
#: How to correct a plain task that has options of this package.
ADD_BASE = "base=IdempotentTask in its decorator, or IdempotentTask among the bases of its class"
#: The attribute that `load` sets on an app whose task modules it has loaded.
_LOADED = "_idempotency_loaded"


class IdempotentTaskLike(Protocol):
    """The attributes of an idempotent task that this package uses; the rest are Celery's."""

    name: str
    run: Any
    backend: Any
    acks_late: bool
    reject_on_worker_lost: bool
    ignore_result: bool

    @property
    def idempotency_configuration(self) -> TaskConfiguration:
        """Its settings, key rule and executor."""

    def idempotency_key_of(self, *args: Any, **kwargs: Any) -> Key:
        """Returns the key of a call."""


def tasks(app: Celery) -> list[IdempotentTaskLike]:
    """Returns the idempotent tasks by name, including disabled ones, without Celery's own."""
    return [
        task
        for _, task in sorted(app.tasks.items())
        if hasattr(task, "idempotency_configuration") and not is_built_in(task)
    ]


def plain_with_options(app: Celery) -> Iterator[tuple[str, str]]:
    """Yields the plain tasks that have options of this package, and what is wrong with each."""
    # The setting ``task_annotations`` may give options to every task by "*". These are meant for
    # the idempotent ones, and are no mistake of a plain task.
    of_all = firstmethod("annotate_any")(app.annotations) or ()
    for name, task in sorted(app.tasks.items()):
        if hasattr(task, "idempotency_configuration") or is_built_in(task):
            continue
        names = {each for each in attributes_of(task) if each.startswith(PREFIX)}
        if options := sorted(names.difference(of_all)):
            yield name, f"it has {', '.join(options)}, but its class is not an IdempotentTask"


def load(app: Celery) -> list[IdempotentTaskLike]:
    """Loads the app's task modules, as a worker does, and returns its idempotent tasks.

    Only the first call for an app loads them, because that also runs Django's system checks, which
    some projects cannot run twice.
    """
    with _lock:
        if _LOADED not in vars(app):
            app.loader.import_default_modules()
            app.finalize()
            setattr(app, _LOADED, True)
    return tasks(app)


def enabled(app: Celery) -> list[IdempotentTaskLike]:
    """Returns the idempotent tasks that are protected."""
    return [task for task in tasks(app) if task.idempotency_configuration.is_protected]


def stores(app_tasks: Iterable[IdempotentTaskLike]) -> list[RecordStore]:
    """Returns the stores of these tasks, one for each server, database and prefix."""
    return distinct(task.idempotency_configuration.executor.store for task in app_tasks)
