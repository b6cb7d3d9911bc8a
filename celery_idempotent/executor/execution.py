"""An execution as its body sees it: ``self.idempotency`` in a bound task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.executor.outcome import Outcome
from celery_idempotent.executor.runtime.run_sync import run_sync
from celery_idempotent.lease.lease import Lease

T = TypeVar("T")


class Protection(Protocol):
    """What makes an execution the only one of its key."""

    lease: Lease[Any]

    def step(self, name: str, func: Callable[[], Any]) -> Coroutine[Any, Any, Outcome]:
        """Run `func` once for the key, or return the value that is stored."""


class BaseExecution:
    """One execution of a key."""

    __slots__ = ("_protection", "attempt", "key", "token")

    def __init__(
        self,
        key: str,
        token: int = 0,
        attempt: int = 1,
        protection: Protection | None = None,
    ) -> None:
        #: ``task:digest``: the same for every duplicate; fit as an idempotency key downstream.
        self.key = key
        #: Fencing token: pass it to the system downstream, and have that refuse smaller ones.
        self.token = token
        #: 1 for the first execution, one more for each that died before this one.
        self.attempt = attempt
        self._protection = protection

    @property
    def recovered(self) -> bool:
        """Whether this took over from an execution that died and may have left effects behind."""
        return self.attempt > 1

    @property
    def protected(self) -> bool:
        """Whether duplicates are kept out.

        False for a plain call, with ``idempotency_enabled=False``, and where the store was
        unavailable under ``on_store_error="run"``.
        """
        return self._protection is not None

    def check(self) -> None:
        """Check, without a round trip, that no other execution can have begun.

        Raises:
            LeaseLostError: if another execution has taken over, or may have.
        """
        if self._protection is None or self._protection.lease.trusted:
            return
        if self._protection.lease.lost:
            raise LeaseLostError(f"{self.key}: another execution has taken over")
        raise LeaseLostError(f"{self.key}: the lease could not be extended in time")


class Execution(BaseExecution):
    """One execution in a thread: ``self.idempotency`` in a bound task."""

    __slots__ = ()

    def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``func(*args, **kwargs)`` once for the key, and return its value.

        The value is stored in one round trip. An execution that takes over, or that follows an
        error, gets it without a second run of `func`. If the worker dies between the end of `func`
        and that round trip, the step runs again: use `key` or `token` to make it idempotent where
        you can. `name` is unique within the task.

        Raises:
            LeaseLostError: before `func` runs if another execution may have begun, or afterwards
                if one has taken over.
            ResultNotStoredError: if an earlier execution finished the step and its value could
                not be stored.
        """
        if self._protection is None:
            return func(*args, **kwargs)
        self.check()
        outcome = run_sync(self._protection.step(name, partial(func, *args, **kwargs)))
        value: T = outcome.get()
        return value


class AsyncExecution(BaseExecution):
    """One execution on an event loop."""

    __slots__ = ("_drive",)

    def __init__(
        self,
        *args: Any,
        drive: Callable[[Coroutine[Any, Any, Outcome]], Coroutine[Any, Any, Outcome]],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._drive = drive

    async def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Execution.step`; an awaitable that `func` returns is awaited."""
        if self._protection is None:
            value = func(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        self.check()
        outcome = await self._drive(self._protection.step(name, partial(func, *args, **kwargs)))
        return outcome.get()


def unprotected(key: str = "") -> Execution:
    """The execution of a call that runs without a record."""
    return Execution(key)
