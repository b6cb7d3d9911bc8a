"""The four contestants and their configuration, the only difference between their scenarios."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar

from celery import Task


class Contestant(ABC):
    """A library, or Celery itself."""

    #: The name of its distribution.
    name: ClassVar[str]

    @property
    def version(self) -> str:
        """The installed version."""
        return version(self.name)

    @abstractmethod
    def task_options(self, lock: float) -> dict[str, Any]:
        """Returns the options of every task: its base class, and the lock or lease in seconds."""

    def settings(self, locks: str) -> dict[str, Any]:
        """Returns the settings of the app; `locks` is the URL of the database for locks."""
        return {}


class Plain(Contestant):
    """Celery without a library."""

    name = "celery"

    def task_options(self, lock: float) -> dict[str, Any]:
        return {"base": Task}


class Once(Contestant):
    """celery-once with its defaults, except for the lock."""

    name = "celery-once"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_once import QueueOnce

        return {"base": QueueOnce, "once": {"timeout": lock}}

    def settings(self, locks: str) -> dict[str, Any]:
        # All apps of a process share the client of the first one, hence one database for all.
        return {"ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": locks}}}


class Singleton(Contestant):
    """celery-singleton with its defaults, except for the lock."""

    name = "celery-singleton"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_singleton import Singleton

        return {"base": Singleton, "lock_expiry": round(lock)}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"singleton_backend_url": locks}


class Idempotent(Contestant):
    """celery-idempotent with its defaults, except for the lease."""

    name = "celery-idempotent"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_idempotent import IdempotentTask

        return {"base": IdempotentTask, "idempotency_lease": lock}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"idempotency_redis_url": locks}


class TwoScripts(Contestant):
    """Celery with two scripts around each task, and nothing else: a measure, not a library."""

    name = "two scripts"

    @property
    def version(self) -> str:
        return PLAIN.version

    def task_options(self, lock: float) -> dict[str, Any]:
        from tests.labs.comparison.two_scripts import TwoScriptsTask

        return {"base": TwoScriptsTask}


PLAIN, OURS, TWO_SCRIPTS = Plain(), Idempotent(), TwoScripts()
CONTESTANTS: tuple[Contestant, ...] = (PLAIN, Once(), Singleton(), OURS)


def find_contestant(name: str) -> Contestant:
    """Returns the contestant of that name."""
    return next(each for each in (*CONTESTANTS, TWO_SCRIPTS) if each.name == name)
