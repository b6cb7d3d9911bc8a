"""What each event loop has of its own: connections, a heartbeat.

The loop itself owns it, as an attribute. A table of loops would keep every one of them alive, even
a table with weak keys: a connection refers to its loop.
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
    """One value for each event loop, for as long as both this and the loop exist.

    Args:
        make: gives the value when a loop first asks for it.
        close: awaited with the value in its loop, when this is garbage, or the loop ends as under
            asyncio.run: an asynchronous generator does it, and of those every loop takes care.
    """

    def __init__(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None
    ) -> None:
        self._make = make
        self._close = close

    def get(self) -> T:
        """The running loop's value."""
        values = _values()
        entry = values.get(self)
        if entry is None:
            value = self._make()
            closing = None
            if self._close is not None:
                closing = _closing(value, self._close, ref(self), values)
                # The first step makes it known to the loop, and awaits nothing.
                with contextlib.suppress(StopIteration):
                    closing.__anext__().__await__().send(None)
            entry = values[self] = value, closing
        return cast("T", entry[0])

    async def aclose(self) -> None:
        """Close the running loop's value; the next call of :meth:`get` makes another."""
        _, closing = _values().pop(self, (None, None))
        if closing is not None:
            await closing.aclose()


#: Each with what closes it, if it is to be closed.
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


_ATTRIBUTE = "_celery_idempotent"

#: The sockets of a loop that is closed without being shut down can be closed by the garbage
#: collector alone, which may be a long time coming: after so many such loops it is called.
MOST_CLOSED = 8

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
    """Drop what closed loops still have; whether it is time to collect it."""
    global _closed
    for each in list(_loops):
        loop = each()
        if loop is None:
            _loops.discard(each)
        elif loop.is_closed():
            _loops.discard(each)
            values: _Values = vars(loop).pop(_ATTRIBUTE, WeakKeyDictionary())
            _closed += any(closing for _, closing in values.values())
    if _closed < MOST_CLOSED:
        return False
    _closed = 0
    return True
