"""Values that belong to one event loop, such as connections and heartbeats.

A loop's values are stored in an attribute of the loop. A dictionary of loops would keep each loop
alive, even with weak keys, because a connection refers to its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop, while both this object and the loop exist.

    Args:
        make: returns the value when a loop first needs it.
        close: awaited with the value in its loop when this object is collected or the loop shuts
            down, as in asyncio.run. An asynchronous generator calls it, because every loop closes
            its generators.
    """

    def __init__(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None
    ) -> None:
        self._make = make
        self._close = close

    def get(self) -> T:
        """Returns the running loop's value."""
        values = _values()
        entry = values.get(self)
        if entry is None:
            value = self._make()
            closing = None
            if self._close is not None:
                closing = _closing(value, self._close, ref(self), values)
                # The first step registers the generator with the loop without suspending.
                with contextlib.suppress(StopIteration):
                    closing.__anext__().__await__().send(None)
            entry = values[self] = value, closing
        return cast("T", entry[0])

    def peek(self) -> T | None:
        """Returns the running loop's value; None if it has none."""
        return cast("T | None", _values().get(self, (None,))[0])

    async def aclose(self) -> None:
        """Closes the running loop's value; the next call of :meth:`get` creates another."""
        _, closing = _values().pop(self, (None, None))
        if closing is not None:
            await closing.aclose()


#: The values of one loop, each with the generator that closes it, if it has one.
_Values = WeakKeyDictionary[PerLoop[Any], tuple[Any, AsyncGenerator[None, None] | None]]


async def _closing(
    value: T, close: Callable[[T], Awaitable[None]], owner: ref[PerLoop[T]], values: _Values
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        if (still := owner()) is not None:
            values.pop(still, None)
        await close(value)


#: The attribute of a loop that has its values.
_ATTRIBUTE = "_celery_idempotent"

#: Number of loops that were closed without ``shutdown_asyncgens`` before the garbage collector is
#: run: only it can close the sockets of their connections.
MOST_CLOSED = 8

#: The loops that have values, and the number of those closed since the last collection.
_loops: set[ref[asyncio.AbstractEventLoop]] = set()
_closed = 0


def _values() -> _Values:
    loop = asyncio.get_running_loop()
    values: _Values | None = getattr(loop, _ATTRIBUTE, None)
    if values is None:
        if _drop_closed():
            gc.collect()
        values = WeakKeyDictionary()
        setattr(loop, _ATTRIBUTE, values)
        _loops.add(ref(loop))
    return values


def _drop_closed() -> bool:
    """Removes the values of closed loops; returns whether to run the garbage collector."""
    global _closed
    for reference in list(_loops):
        loop = reference()
        if loop is None:
            _loops.discard(reference)
        elif loop.is_closed():
            _loops.discard(reference)
            values: _Values = vars(loop).pop(_ATTRIBUTE, WeakKeyDictionary())
            _closed += any(closing for _, closing in values.values())
    if _closed < MOST_CLOSED:
        return False
    _closed = 0
    return True
