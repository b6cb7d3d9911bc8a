"""The tasks of an app that pass the gate, and the stores that their records are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from celery import Celery

from celery_idempotent.executor.executor import Executor
from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.settings import Settings
from celery_idempotent.store.record_store import RecordStore

#: Celery's own tasks that call another once for each item, with arguments made of the item.
MAPPING: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "celery.map": lambda item: (item,),
    "celery.starmap": tuple,
}


class Configuration(Protocol):
    """What a task goes by."""

    settings: Settings
    rule: KeyRule

    @property
    def executor(self) -> Executor:
        """The gate to its Redis."""


class IdempotentTaskLike(Protocol):
    """A task under the gate, as an app's registry has it. Celery's attributes are its own."""

    name: str
    app: Celery
    acks_late: bool
    reject_on_worker_lost: bool
    ignore_result: bool
    serializer: str
    send_events: bool

    @property
    def idempotency_configuration(self) -> Configuration:
        """Its settings, key rule and gate."""

    def idempotency_key_of(self, *args: Any, **kwargs: Any) -> Key:
        """The key of a call."""


def tasks(app: Celery) -> list[IdempotentTaskLike]:
    """All of them by name, those with ``idempotency_enabled=False`` too."""
    named: dict[str, IdempotentTaskLike] = {
        name: task for name, task in app.tasks.items() if hasattr(task, "idempotency_configuration")
    }
    return [named[name] for name in sorted(named)]


def enabled(app: Celery) -> list[IdempotentTaskLike]:
    """Those that do pass the gate."""
    return [task for task in tasks(app) if task.idempotency_configuration.settings.enabled]


def stores(app_tasks: Iterable[IdempotentTaskLike]) -> list[RecordStore]:
    """The stores of these tasks, each once."""
    return list(dict.fromkeys(task.idempotency_configuration.executor.store for task in app_tasks))
