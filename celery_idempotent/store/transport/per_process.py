"""Values that a forked process must not share with its parent, such as connections."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """One value for each process, with the interface of `PerLoop`.

    Args:
        make: returns the value when a process first needs it.
        close: awaited with the value by `aclose`.
    """

    def __init__(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None
    ) -> None:
        self._make = make
        self._close = close
        self._entry: tuple[int, T] | None = None

    def get(self) -> T:
        """Returns this process's value."""
        entry = self._entry
        if entry is None or entry[0] != os.getpid():
            entry = self._entry = os.getpid(), self._make()
        return entry[1]

    async def aclose(self) -> None:
        """Closes this process's value; the next call of `get` makes another."""
        value, self._entry = self.get(), None
        if self._close is not None:
            await self._close(value)
