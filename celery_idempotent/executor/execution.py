"""An execution, as the code that runs sees it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.executor.outcome import Outcome
from celery_idempotent.executor.runtime.run_sync import run_sync
from celery_idempotent.lease.lease import Lease

T = TypeVar("T")


class Steps(Protocol):
    """The steps of an execution, finished ones known."""

    async def run(self, name: str, work: Callable[[], Any]) -> Outcome:
        """How the step ends: as `work` does, or with the value kept."""


class BaseExecution:
    """One run under the gate, whichever world it runs in."""

    __slots__ = ("_lease", "_steps", "attempt", "key", "token")

    def __init__(
        self,
        key: str,
        token: int,
        attempt: int,
        lease: Lease[Any] | None = None,
        steps: Steps | None = None,
    ) -> None:
        #: ``task:digest``: the same for every duplicate, fit as the key of a system downstream.
        self.key = key
        #: Fencing token: hand it to the system downstream, and let that refuse smaller ones.
        self.token = token
        #: 1 for the first execution, one more for each that died before this one.
        self.attempt = attempt
        self._lease = lease
        self._steps = steps

    @property
    def recovered(self) -> bool:
        """Whether this takes over from an execution that died: look what it left behind."""
        return self.attempt > 1

    @property
    def protected(self) -> bool:
        """False where nothing keeps a duplicate out: a plain call, an ungated one, or a store
        that could not be asked under ``on_store_error="run"``.
        """
        return self._lease is not None

    def check(self) -> None:
        """Make sure, from memory and without a round trip, that nobody else can be running.

        Raises:
            LeaseLostError: if another execution has taken over, or may have by now.
        """
        if self._lease is None or self._lease.trusted:
            return
        if self._lease.lost:
            raise LeaseLostError(f"{self.key}: another execution has taken over")
        raise LeaseLostError(f"{self.key}: the lease could not be extended in time")

    def _step(self, name: str, work: Callable[[], Any]) -> Coroutine[Any, Any, Outcome]:
        assert self._steps is not None
        self.check()
        return self._steps.run(name, work)


class Execution(BaseExecution):
    """One run under the gate: ``self.idempotency`` in a bound task."""

    __slots__ = ()

    def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``func(*args, **kwargs)`` once for the key, and return what it returned.

        One round trip keeps the value; an execution that takes over, or comes after an error,
        gets it back without running `func`. A worker that dies between the end of `func` and that
        round trip leaves the step to be run again: make what it does idempotent by `key` or
        `token` where you can. `name` is the step's, unique within the task.

        Raises:
            LeaseLostError: before `func` runs, if another execution may be running, or after, if
                one has taken over meanwhile.
            ResultNotStoredError: if an earlier execution finished the step and its value could
                not be kept.
        """
        if self._steps is None:
            return func(*args, **kwargs)
        value: T = run_sync(self._step(name, lambda: func(*args, **kwargs))).get()
        return value


class AsyncExecution(BaseExecution):
    """One run under the gate on an event loop."""

    __slots__ = ("_drive",)

    def __init__(
        self,
        *args: Any,
        drive: Callable[[Coroutine[Any, Any, Outcome]], Coroutine[Any, Any, Outcome]],
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self._drive = drive

    async def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Execution.step`; what `func` returns is awaited where it can be."""
        if self._steps is None:
            value = func(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        return (await self._drive(self._step(name, lambda: func(*args, **kwargs)))).get()


def unprotected(key: str = "") -> Execution:
    """The execution of a call that did not pass the gate: it runs, and nothing stands behind it."""
    return Execution(key, token=0, attempt=1)
