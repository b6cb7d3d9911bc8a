"""Ears for whichever event loop asks."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from celery_idempotent.store.per_loop import PerLoop
from celery_idempotent.store.tracking import CHANNEL, HEAD, LOOK_EVERY, Hearing, connector, is_news
from celery_idempotent.store.transport.asyncio import HUNG_UP
from celery_idempotent.store.transport.connection import FAULTS

_FAULTS = (*FAULTS, asyncio.TimeoutError, *HUNG_UP)


class AsyncEars:
    """As `Ears`; connections belong to an event loop.

    Args:
        server_of: gives the pool, or the cluster's node, that has the record of a name.
    """

    def __init__(self, server_of: Callable[[str], Any]) -> None:
        self._server_of = server_of
        self._free: PerLoop[_Free] = PerLoop(lambda: defaultdict(list), _hang_up)
        self._hearing = Hearing()

    async def until_changed(self, name: str, seen: bytes, seconds: float) -> None:
        """As `Ears.until_changed`."""
        if not self._hearing.is_deaf():
            try:
                return await self._hear(name, seen, seconds)
            except _FAULTS as error:
                self._hearing.lost(error)
        await asyncio.sleep(min(seconds, LOOK_EVERY))
        return None

    async def _hear(self, name: str, seen: bytes, seconds: float) -> None:
        server = self._server_of(name)
        free = self._free.get()[server]
        used = free.pop() if free else None
        ear = used or _Ear(connector(server))
        try:
            if used is None:
                await ear.open()
            await ear.hear(name, seen, seconds)
        except BaseException as error:
            await ear.close()
            if used is None or not isinstance(error, _FAULTS):
                raise
            free.clear()
        else:
            free.append(ear)

    async def aclose(self) -> None:
        """Hang up in the running event loop; the next call connects again."""
        await self._free.aclose()


class _Ear:
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

    async def hear(self, name: str, seen: bytes, seconds: float) -> None:
        until = time.monotonic() + seconds
        if await _ask(self._asks, "GETRANGE", name, 0, HEAD - 1) != seen[:HEAD]:
            return
        while (left := until - time.monotonic()) > 0:
            message = await self._hears.read_response(timeout=left)
            if message is not None and is_news(message, name):
                return

    async def close(self) -> None:
        await self._hears.disconnect(nowait=True)
        await self._asks.disconnect(nowait=True)


#: By server.
_Free = defaultdict[Any, list[_Ear]]


async def _hang_up(ears: _Free) -> None:
    for free in ears.values():
        while free:
            await free.pop().close()


async def _ask(connection: Any, *words: Any) -> Any:
    await connection.send_command(*words)
    return await connection.read_response()
