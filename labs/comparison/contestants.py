"""The contestants and their configuration, the only difference between their scenarios."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from celery import Celery, Task

from labs.comparison.pushing import PushedTask, PushingApp

#: The environments of those contestants that have one of their own.
ENVIRONMENTS = Path(__file__).parents[2] / ".peers"

Body = Callable[..., Any]


class Contestant(ABC):
    """A library, or Celery itself."""

    #: The name of its distribution.
    name: ClassVar[str]
    #: The queues from which its worker takes messages.
    queues: ClassVar[tuple[str, ...]] = ("celery",)
    #: The reason, by the name of each scenario that does not apply; `chaos` is the lab.
    not_applicable: ClassVar[Mapping[str, str]] = {}

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

    @property
    def is_installed(self) -> bool:
        """Whether its environment is complete."""
        return True

    @property
    def python(self) -> str:
        """The interpreter of its workers."""
        return sys.executable

    def make_app(self, name: str) -> Celery:
        """Returns the app that publishes."""
        return Celery(name, set_as_current=False)

    def make_worker_app(self, name: str, backend: str, lock: float) -> Celery:
        """Returns the app of a worker; `backend` is the URL of the result backend."""
        return self.make_app(name)

    def worker_task(self, app: Celery, locks: str, lock: float, **options: Any) -> Any:
        """Returns the decorator of a task in a worker."""
        return app.task(**options)


class PeerInEnvironment(Contestant):
    """A library that is installed into an environment of its own, for its workers.

    Elsewhere its tasks are Celery's: these libraries act only in the worker.
    """

    number: ClassVar[str]
    extras: ClassVar[str] = ""

    @property
    def version(self) -> str:
        return self.number

    @property
    def requirement(self) -> str:
        """For pip."""
        return f"{self.name}{self.extras}=={self.number}"

    @property
    def folder(self) -> Path:
        """The environment."""
        return ENVIRONMENTS / f"{self.name}-{self.number}"

    @property
    def installed(self) -> Path:
        """The file that is written when the environment is complete: what pip has installed."""
        return self.folder / "requirements.txt"

    @property
    def is_installed(self) -> bool:
        return self.installed.exists()

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def task_options(self, lock: float) -> dict[str, Any]:
        return {"base": Task}


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


class Idemkit(PeerInEnvironment):
    """idemkit's decorator under Celery's, with its defaults, except for the lease."""

    name, number, extras = "idemkit", "1.0.2", "[redis]"

    def worker_task(self, app: Celery, locks: str, lock: float, **options: Any) -> Any:
        from idemkit import MethodConfig, RedisBackend, idempotent_sync

        config = MethodConfig(key_fields=["order"], lease_ttl_seconds=lock)
        decorate = idempotent_sync(backend=RedisBackend.from_url(locks), config=config)
        return lambda body: app.task(**options)(decorate(body))


class Fencekit(PeerInEnvironment):
    """fencekit's decorator under Celery's, as its README has it, except for the lock."""

    name, number, extras = "fencekit", "0.6.1", "[celery]"

    def worker_task(self, app: Celery, locks: str, lock: float, **options: Any) -> Any:
        from fencekit import DistributedLock, IdempotencyGuard, idempotency_key
        from fencekit.celery import idempotent_task
        from redis import Redis

        redis = Redis.from_url(locks, decode_responses=True)

        def decorate(body: Body) -> Any:
            parameters = signature(body)
            bound = (None,) if "self" in parameters.parameters else ()

            def key(*args: Any, **kwargs: Any) -> str:
                order = parameters.bind(*bound, *args, **kwargs).arguments["order"]
                return idempotency_key({"order": order}, namespace=body.__name__)

            idempotent = idempotent_task(
                IdempotencyGuard(redis),
                DistributedLock(redis),
                key=key,
                lock_resource=key,
                idempotency_ttl=timedelta(hours=24),
                lock_ttl=timedelta(seconds=lock),
                retry_on_in_progress=True,
            )
            return app.task(**options)(idempotent(body))

        return decorate


class Relier(PeerInEnvironment):
    """relier's decorator and app with its defaults, except for the lock.

    Its tasks are published by its ``apush``, in a process of its environment.
    """

    name, number = "relier", "0.1.7"
    queues = ("default", "high_priority", "low_priority", "re-queue")
    not_applicable: ClassVar = {
        "lost": "its decorator always requeues the message of a killed process",
        "retry": "its functions have no `self.retry`",
        "stopped": "`apush` takes no task id and no time limit",
        "chord": "`apush` publishes no chords",
        "chain": "`apush` publishes no chains",
        "chaos": "its tasks use its own queues, and have no `self.retry`",
    }

    #: Its settings are whole seconds; the lock is longer than both timeouts of a task.
    SHORTEST_LOCK = 3

    def task_options(self, lock: float) -> dict[str, Any]:
        return {"base": PushedTask}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"task_default_queue": "default"}

    def make_app(self, name: str) -> Celery:
        return PushingApp(name, self.python)

    def make_worker_app(self, name: str, backend: str, lock: float) -> Celery:
        seconds = max(self.SHORTEST_LOCK, round(lock))
        os.environ |= {
            "RELIER_REDIS_URL": backend,
            "RELIER_IDEMPOTENCY_INFLIGHT_TTL": str(seconds),
            "RELIER_HARD_TIMEOUT": str(min(30, seconds - 1)),
            "RELIER_SOFT_TIMEOUT": str(min(25, seconds - 2)),
        }
        from relier.tasks.app import celery_app

        return celery_app

    def worker_task(self, app: Celery, locks: str, lock: float, **options: Any) -> Any:
        from relier import rl_task

        def decorate(body: Body) -> Any:
            function = body
            if "self" in signature(body).parameters:
                unbound = SimpleNamespace(request=SimpleNamespace(id=None))

                @wraps(body)
                def function(*args: Any, **kwargs: Any) -> Any:
                    return body(unbound, *args, **kwargs)

            return rl_task(idempotent=True, name=options["name"])(function)

        return decorate


class Idempotent(Contestant):
    """celery-idempotent with its defaults, except for the lease."""

    name = "celery-idempotent"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_idempotent import IdempotentTask

        return {"base": IdempotentTask, "idempotency_lease": lock}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"idempotency_redis_url": locks}


PLAIN, OURS = Plain(), Idempotent()
PEERS_IN_ENVIRONMENTS: tuple[PeerInEnvironment, ...] = (Relier(), Idemkit(), Fencekit())
CONTESTANTS: tuple[Contestant, ...] = (PLAIN, Once(), Singleton(), *PEERS_IN_ENVIRONMENTS, OURS)


def find_contestant(name: str) -> Contestant:
    """Returns the contestant of that name."""
    return next(each for each in CONTESTANTS if each.name == name)
