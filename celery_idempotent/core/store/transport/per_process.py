"""Values that belong to one process, such as connections."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """One value for each process: a forked child does not share its parent's."""

    def __init__(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None
    ) -> None:
        self._make, self._close = make, close
        #: By process id: this process's value or, until it has one, that of its parent.
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """Returns this process's value."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            value = self._values.setdefault(pid, self._make())  # one for all threads
            for other in list(self._values):
                if other != pid:
                    self._values.pop(other, None)
            return value

    def peek(self) -> T | None:
        """Returns this process's value; None if it has none."""
        return self._values.get(os.getpid())

    async def aclose(self) -> None:
        """Closes this process's value; the next call of `get` creates another."""
        value = self._values.pop(os.getpid(), None)
        if self._close is not None and value is not None:
            await self._close(value)
