"""Waits for CLIENT TRACKING invalidations instead of polling.

The server remembers which keys a connection with CLIENT TRACKING has read, and sends an
invalidation when one of them changes. A RESP2 connection cannot receive it between replies, so a
second connection subscribes to the invalidations of the first.

An invalidation can be lost with its connection, so callers also poll at intervals.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import redis

from celery_idempotent.clock import monotonic
from celery_idempotent.store.transport.client import ClientTransport
from celery_idempotent.store.transport.connection import CONNECTION_ERRORS, result_of
from celery_idempotent.store.transport.server import ServerTransport

logger = logging.getLogger(__name__)

CHANNEL = "__redis__:invalidate"
#: Leading bytes of a record, its fixed-position fields, which differ between any two states.
HEAD = 16

#: Seconds between two polls of a server that sends no invalidations.
POLL_INTERVAL = 0.2
#: Seconds before CLIENT TRACKING is tried again on such a server.
RETRY_TRACKING_AFTER = 10.0


class InvalidationListener:
    """Keeps tracked connections for any number of waiting callers."""

    def __init__(self, transport: ServerTransport | ClientTransport) -> None:
        self._transport = transport
        self._idle = transport.scoped(lambda: _Idle(list), _close_all)
        self._unavailable_until = 0.0

    async def wait_for_change(self, name: str, seen: bytes, seconds: float) -> None:
        """Returns soon after the record of this name differs from `seen`, or after `seconds`.

        If the server sends no invalidations, it returns after `POLL_INTERVAL`.
        """
        if monotonic() >= self._unavailable_until:
            try:
                return await self._wait(name, seen, seconds)
            except CONNECTION_ERRORS as error:
                # The server is unreachable, or its user may not use CLIENT TRACKING.
                logger.debug("Waiting calls poll every %g s: %s", POLL_INTERVAL, error)
                self._unavailable_until = monotonic() + RETRY_TRACKING_AFTER
        await self._transport.sleep(min(seconds, POLL_INTERVAL))
        return None

    async def _wait(self, name: str, seen: bytes, seconds: float) -> None:
        pool = self._transport.pool_of(name)
        server = pool.connection_kwargs
        idle = self._idle.get()[server.get("host"), server.get("port")]
        try:
            connection, reused = idle.pop(), True
        except IndexError:
            connection, reused = TrackedConnection(pool, is_async=self._transport.is_async), False
        try:
            if not reused:
                await connection.connect()
            await connection.wait_for_change(name, seen, seconds)
        except BaseException as error:
            await connection.aclose()
            if not reused or not isinstance(error, CONNECTION_ERRORS):
                raise
            await _close(idle)  # most likely, they have been lost with this one
        else:
            idle.append(connection)

    async def aclose(self) -> None:
        """Closes the idle connections; the next call reconnects."""
        await self._idle.aclose()


#: redis-py before 5 has RESP2 only.
_RESP2 = {"protocol": 2} if int(redis.__version__.partition(".")[0]) >= 5 else {}
#: Options that redis-py 8 rejects together with RESP2.
_RESP3_OPTIONS = ("maint_notifications", "oss_cluster_maint_notifications")


class TrackedConnection:
    """A connection that reads records, and one that receives their invalidations.

    Args:
        pool: redis-py's, whose connection options are used with RESP2.
    """

    def __init__(self, pool: Any, *, is_async: bool) -> None:
        self._is_async = is_async
        kept = {n: v for n, v in pool.connection_kwargs.items() if not n.startswith(_RESP3_OPTIONS)}
        self._receiver = pool.connection_class(**kept | _RESP2)
        self._reader = pool.connection_class(**kept | _RESP2)

    async def connect(self) -> None:
        # Explicitly: the first command would not query the Sentinels for the master.
        await result_of(self._receiver.connect())
        await result_of(self._reader.connect())
        client_id = await _request(self._receiver, "CLIENT", "ID")
        await _request(self._receiver, "SUBSCRIBE", CHANNEL)
        await _request(self._reader, "CLIENT", "TRACKING", "ON", "REDIRECT", client_id)

    async def wait_for_change(self, name: str, seen: bytes, seconds: float) -> None:
        until = monotonic() + seconds
        while await self._receive(0) is not None:
            pass  # the invalidation of a record that an earlier caller waited for
        if await _request(self._reader, "GETRANGE", name, 0, HEAD - 1) != seen[:HEAD]:
            return
        while (left := until - monotonic()) > 0:
            message = await self._receive(left)
            if message is not None and is_invalidation(message, name):
                return

    async def _receive(self, timeout: float) -> Any:
        """Returns the next message, or None if none arrives within `timeout` seconds."""
        if self._is_async:
            return await result_of(self._receiver.read_response(timeout=timeout))
        return self._receiver.read_response() if self._receiver.can_read(timeout) else None

    async def aclose(self) -> None:
        await result_of(self._receiver.disconnect(True))
        await result_of(self._reader.disconnect(True))


async def _request(connection: Any, *command: Any) -> Any:
    await result_of(connection.send_command(*command))
    return await result_of(connection.read_response())


def is_invalidation(message: Any, name: str) -> bool:
    """Returns whether a message invalidates the record of this name."""
    names = message[2]
    return names is None or name.encode() in names  # None: all of them, after a flush


#: Idle connections by the host and port of their server; None if its options have none.
_Idle = defaultdict[tuple[Any, Any], list[TrackedConnection]]


async def _close_all(idle: _Idle) -> None:
    for connections in idle.values():
        await _close(connections)


async def _close(connections: list[TrackedConnection]) -> None:
    while connections:
        await connections.pop().aclose()
