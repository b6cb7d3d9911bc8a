"""The four, and what each needs to be set up: everything in which their scenarios differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar

from celery import Task


class Contestant(ABC):
    """A way to write a task."""

    #: As the table has it, and the distribution that it comes from.
    name: ClassVar[str]

    @property
    def version(self) -> str:
        """Of what is installed."""
        return version(self.name)

    @abstractmethod
    def task_options(self, lock: float) -> dict[str, Any]:
        """Options of every task: its base class, and how long its lock or lease is (seconds)."""

    def settings(self, locks: str) -> dict[str, Any]:
        """Settings of the app; `locks` is the URL of the Redis database that is meant for locks."""
        return {}


class Plain(Contestant):
    """Celery alone."""

    name = "celery"

    def task_options(self, lock: float) -> dict[str, Any]:
        return {"base": Task}


class Once(Contestant):
    """celery-once, at its defaults but for the lock."""

    name = "celery-once"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_once import QueueOnce

        return {"base": QueueOnce, "once": {"timeout": lock}}

    def settings(self, locks: str) -> dict[str, Any]:
        # It keeps the client of the first app in a process for all: one database for all apps.
        return {"ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": locks}}}


class Singleton(Contestant):
    """celery-singleton, at its defaults but for the lock."""

    name = "celery-singleton"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_singleton import Singleton

        return {"base": Singleton, "lock_expiry": round(lock)}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"singleton_backend_url": locks}


class Idempotent(Contestant):
    """celery-idempotent, at its defaults but for the lease."""

    name = "celery-idempotent"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_idempotent import IdempotentTask

        return {"base": IdempotentTask, "idempotency_lease": lock}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"idempotency_redis_url": locks}


PLAIN, OURS = Plain(), Idempotent()
CONTESTANTS: tuple[Contestant, ...] = (PLAIN, Once(), Singleton(), OURS)


def contestant_named(name: str) -> Contestant:
    """The one of that name."""
    return next(contestant for contestant in CONTESTANTS if contestant.name == name)
