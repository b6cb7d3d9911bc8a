"""The contestants and their configuration, the only difference between their scenarios."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from celery import Celery, Task

#: The environments of those contestants that have one of their own.
ENVIRONMENTS = Path(__file__).parents[2] / ".peers"

Body = Callable[..., Any]


class Contestant:
    """A library, or Celery itself."""

    #: The name of its distribution.
    name: ClassVar[str]

    @property
    def version(self) -> str:
        """The installed version."""
        return version(self.name)

    def task_options(self, lock: float) -> dict[str, Any]:
        """Returns the options of every task: its base class, and the lock or lease in seconds."""
        return {"base": Task}

    def settings(self, locks: str) -> dict[str, Any]:
        """Returns the settings of the app; `locks` is the URL of the database for locks."""
        return {}

    @property
    def python(self) -> str:
        """The interpreter of its workers."""
        return sys.executable

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
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


class Plain(Contestant):
    """Celery without a library."""

    name = "celery"


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


class Idempotent(Contestant):
    """celery-idempotent with its defaults, except for the lease."""

    name = "celery-idempotent"

    def task_options(self, lock: float) -> dict[str, Any]:
        from celery_idempotent import IdempotentTask

        return {"base": IdempotentTask, "idempotency_lease": lock}

    def settings(self, locks: str) -> dict[str, Any]:
        return {"idempotency_redis_url": locks}


PLAIN, OURS = Plain(), Idempotent()
PEERS_IN_ENVIRONMENTS: tuple[PeerInEnvironment, ...] = (Idemkit(), Fencekit())
CONTESTANTS: tuple[Contestant, ...] = (PLAIN, Once(), Singleton(), *PEERS_IN_ENVIRONMENTS, OURS)


def find_contestant(name: str) -> Contestant:
    """Returns the contestant of that name."""
    return next(each for each in CONTESTANTS if each.name == name)
