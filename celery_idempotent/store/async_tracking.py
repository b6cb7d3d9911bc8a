"""Ears for whichever event loop asks."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from celery_idempotent.store.per_loop import PerLoop
from celery_idempotent.store.tracking import (
    CHANNEL,
    HEAD,
    POLL_INTERVAL,
    TrackingStatus,
    connector,
    is_invalidation,
)
from celery_idempotent.store.transport.asyncio import CLOSED_CONNECTION_ERRORS
from celery_idempotent.store.transport.connection import CONNECTION_ERRORS

_CONNECTION_ERRORS = (*CONNECTION_ERRORS, asyncio.TimeoutError, *CLOSED_CONNECTION_ERRORS)


class AsyncInvalidationListener:
    """As `Ears`; connections belong to an event loop.

    Args:
        server_of: gives the pool, or the cluster's node, that has the record of a name.
    """

    def __init__(self, pool_for: Callable[[str], Any]) -> None:
        self._server_of = pool_for
        self._free: PerLoop[_Free] = PerLoop(lambda: defaultdict(list), _hang_up)
        self._hearing = TrackingStatus()

    async def wait_for_change(self, name: str, seen: bytes, seconds: float) -> None:
        """As `Ears.until_changed`."""
        if not self._hearing.is_unavailable():
            try:
                return await self._hear(name, seen, seconds)
            except _CONNECTION_ERRORS as error:
                self._hearing.lost(error)
        await asyncio.sleep(min(seconds, POLL_INTERVAL))
        return None

    async def _hear(self, name: str, seen: bytes, seconds: float) -> None:
        server = self._server_of(name)
        free = self._free.get()[server]
        used = free.pop() if free else None
        ear = used or TrackedConnection(connector(server))
        try:
            if used is None:
                await ear.open()
            await ear.wait(name, seen, seconds)
        except BaseException as error:
            await ear.close()
            if used is None or not isinstance(error, _CONNECTION_ERRORS):
                raise
            free.clear()
        else:
            free.append(ear)

    async def aclose(self) -> None:
        """Hang up in the running event loop; the next call connects again."""
        await self._free.aclose()


class TrackedConnection:
    """One connection that asks, and one that hears."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._hears, self._asks = connect(), connect()

    async def open(self) -> None:
        # Not left to the first command, which would not ask sentinels where the master is.
        await self._hears.connect()
        await self._asks.connect()
        number = await _ask(self._hears, "CLIENT", "ID")
        await _ask(self._hears, "SUBSCRIBE", CHANNEL)
        await _ask(self._asks, "CLIENT", "TRACKING", "ON", "REDIRECT", number)

    async def wait(self, name: str, seen: bytes, seconds: float) -> None:
        until = time.monotonic() + seconds
        if await _ask(self._asks, "GETRANGE", name, 0, HEAD - 1) != seen[:HEAD]:
            return
        while (left := until - time.monotonic()) > 0:
            message = await self._hears.read_response(timeout=left)
            if message is not None and is_invalidation(message, name):
                return

    async def close(self) -> None:
        await self._hears.disconnect(nowait=True)
        await self._asks.disconnect(nowait=True)


#: By server.
_Free = defaultdict[Any, list[TrackedConnection]]


async def _hang_up(ears: _Free) -> None:
    for free in ears.values():
        while free:
            await free.pop().close()


async def _ask(connection: Any, *args: Any) -> Any:
    await connection.send_command(*args)
    return await connection.read_response()
