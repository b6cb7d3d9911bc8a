"""An execution, as the code that runs sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.lease.held import Lease

T = TypeVar("T")


class Steps(Protocol):
    """The steps of an execution, finished ones known."""

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """The value of the step: `work`'s, or the one kept."""


class Execution:
    """One run under the gate: ``self.idempotency`` in a bound task."""

    __slots__ = ("_lease", "_steps", "attempt", "key", "token")

    def __init__(
        self,
        key: str,
        token: int,
        attempt: int,
        lease: Lease | None = None,
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
        self.check()
        value: T = self._steps.run(name, lambda: func(*args, **kwargs))
        return value


def unprotected(key: str = "") -> Execution:
    """The execution of a call that did not pass the gate: it runs, and nothing stands behind it."""
    return Execution(key, token=0, attempt=1)
