"""Waits for changes of records by CLIENT TRACKING instead of polling.

A call that waits for another's outcome uses it, and `waking`. The server remembers which keys a
connection with CLIENT TRACKING has read, and sends an invalidation when one of them changes. A
RESP2 connection cannot receive it between replies, so a second connection subscribes to the
invalidations of the first. All calls of a process or an event loop that wait for records on one
server share these two connections, and one read of a record.

An invalidation can be lost with its connection, so callers also poll at intervals.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.transport.client import ClientTransport
from celery_idempotent.core.store.transport.connection import CONNECTION_ERRORS, result_of
from celery_idempotent.core.store.transport.server import ServerTransport

logger = logging.getLogger(__name__)

CHANNEL = "__redis__:invalidate"
#: Bytes at the start of a record, where state, token and times are: they differ after any change
#: for which a call waits.
HEAD = 16

#: Seconds between two polls of a server that sends no invalidations.
POLL_INTERVAL = 0.2
#: Seconds before CLIENT TRACKING is tried again on such a server.
RETRY_TRACKING_AFTER = 10.0
#: Seconds without an invalidation after which both connections are checked by a PING.
CHECK_INTERVAL = 1.0
#: Seconds without a waiting call after which both are closed.
IDLE_TIMEOUT = 5.0


class InvalidationListener:
    """Waits for changes of the records in one store."""

    def __init__(self, transport: ServerTransport | ClientTransport) -> None:
        self._transport = transport
        self._servers = transport.scoped(dict[Any, TrackedServer], _close_all)

    async def wait_for_change(self, name: str, seen: bytes, seconds: float) -> None:
        """Returns soon after the record of this name differs from `seen`, or after `seconds`.

        If the server sends no invalidations, it returns after `POLL_INTERVAL`.
        """
        with suppress(*CONNECTION_ERRORS):  # a cluster may have no server for the record
            if await self._server_of(name).wait_for_change(name, seen, seconds):
                return
        await self._transport.sleep(min(seconds, POLL_INTERVAL))

    async def track(self, name: str, size: int, on_change: Callable[[], object]) -> bytes | None:
        """Returns the first bytes of a value, and has `on_change` called when it changes.

        It is called once, in any thread, and replaces that of an earlier call for the name. Returns
        None if the server sends no invalidations.
        """
        with suppress(*CONNECTION_ERRORS):
            return await self._server_of(name).track(name, size, on_change)
        return None

    def untrack(self, name: str) -> None:
        """Forgets the `on_change` of :meth:`track`."""
        with suppress(*CONNECTION_ERRORS):
            self._server_of(name).untrack(name)

    def _server_of(self, name: str) -> TrackedServer:
        pool, servers = self._transport.pool_of(name), self._servers.get()
        address = pool.connection_kwargs.get("host"), pool.connection_kwargs.get("port")
        server = servers.get(address)
        if server is None:
            server = servers.setdefault(address, TrackedServer(pool, self._transport))
        return server

    async def aclose(self) -> None:
        """Closes the connections (of the running event loop); the next call reconnects."""
        await self._servers.aclose()


async def _close_all(servers: dict[Any, TrackedServer]) -> None:
    while servers:
        await servers.popitem()[1].aclose()


#: redis-py before 5 has RESP2 only.
_RESP2 = {"protocol": 2} if int(redis.__version__.partition(".")[0]) >= 5 else {}
#: Options that redis-py 8 rejects together with RESP2.
_RESP3_OPTIONS = ("maint_notifications", "oss_cluster_maint_notifications")


class _Watch:
    """One record whose changes are tracked: for calls that wait, or for `on_change`."""

    def __init__(self, notify: Callable[[], object], changed: Any = None) -> None:
        #: Called when the record changes: sets `changed`, or is the `on_change` of `track`.
        self.notify = notify
        #: The event of threading or asyncio that waiting calls wait for; None for `track`.
        self.changed = changed
        #: Number of calls that wait; the last one removes the watch.
        self.waiting = 0
        #: The head of the record at the last read, which also made the server track it; None before
        #: that, and if the server sends no invalidations.
        self.head: bytes | None = None


class TrackedServer:
    """A connection that reads records, and one that receives their invalidations.

    A thread, or a task of the event loop, receives the invalidations while calls wait.

    Args:
        pool: redis-py's connection pool; both connections get its options, but use RESP2.
        transport: its connections read the records afterwards, and its clock is set here.
    """

    def __init__(self, pool: Any, transport: ServerTransport | ClientTransport) -> None:
        self._transport = transport
        self._is_async = is_async = transport.is_async
        args = {n: v for n, v in pool.connection_kwargs.items() if not n.startswith(_RESP3_OPTIONS)}
        args |= {**_RESP2, "health_check_interval": 0}
        self._new_connection = partial(pool.connection_class, **args)
        #: The connection that reads and the one that receives, while they are open.
        self._pair: tuple[Any, Any] | None = None
        #: The task of the event loop that receives; None in blocking code, where a thread does.
        self._listening: asyncio.Task[None] | None = None
        #: Protects the connection that reads, for a whole request.
        self._reader_lock: Any = asyncio.Lock() if is_async else threading.Lock()
        #: Protects `_watches`, never during I/O.
        self._guard = threading.Lock()
        self._watches: dict[bytes, _Watch] = {}
        #: Calls poll until then, after the server refused CLIENT TRACKING (seconds of `monotonic`).
        self._retry_at = 0.0

    async def wait_for_change(self, name: str, seen: bytes, seconds: float) -> bool:
        """Waits as `InvalidationListener` does; returns False at once if it cannot."""
        until, key, head = monotonic() + seconds, name.encode(), seen[:HEAD]
        changed: Any = asyncio.Event() if self._is_async else threading.Event()
        with self._guard:
            watch = self._watches.setdefault(key, _Watch(changed.set, changed))
            watch.waiting += 1
        try:
            if watch.head != head:
                # Shielded: if the caller is cancelled, the reply must still be read, because the
                # next request on the connection would read it as its own.
                reading = self._locked(lambda: self._read(key, watch, head))
                await (asyncio.shield(reading) if self._is_async else reading)
            if watch.head == head:
                await self._until(watch.changed, until - monotonic())
            return watch.head is not None
        finally:
            with self._guard:
                watch.waiting -= 1
                if not watch.waiting and self._watches.get(key) is watch:
                    del self._watches[key]

    async def track(self, name: str, size: int, on_change: Callable[[], object]) -> bytes | None:
        """See `InvalidationListener`."""
        key, watch = name.encode(), _Watch(on_change)
        with self._guard:
            self._watches[key] = watch
        await self._locked(lambda: self._read(key, watch, None, size))
        return watch.head

    def untrack(self, name: str) -> None:
        """See `InvalidationListener`."""
        with self._guard:
            self._watches.pop(name.encode(), None)

    async def _until(self, changed: Any, seconds: float) -> None:
        if not self._is_async:
            changed.wait(max(seconds, 0))
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), seconds)

    async def _locked(self, function: Callable[[], Any]) -> None:
        """Awaits `function` while no other call uses the connection that reads."""
        if self._is_async:
            async with self._reader_lock:
                await function()
        else:
            with self._reader_lock:
                await function()

    async def _read(self, key: bytes, watch: _Watch, head: bytes | None, size: int = HEAD) -> None:
        """Reads the head of a record into `watch`, and so makes the server track it.

        Not if another call, which had the lock before, has read a head that equals `head`: the
        record is tracked since then, and has not changed since its caller saw it.
        """
        pair, is_known = self._pair, head is not None and watch.head == head
        if is_known or (pair is None and monotonic() < self._retry_at):
            return
        try:
            if pair is None:
                # Reset below. It stays if the server is unreachable or refuses CLIENT TRACKING.
                self._retry_at = monotonic() + RETRY_TRACKING_AFTER
                pair = self._pair = self._new_connection(), self._new_connection()
                await self._open(*pair)
                self._retry_at = 0.0
            watch.head = await _request(pair[0], "GETRANGE", key, 0, size - 1)
        except BaseException as error:
            logger.debug("Waiting calls poll every %g s: %r", POLL_INTERVAL, error)
            # An error reply to GETRANGE concerns one record, such as one that has moved to another
            # node, and leaves the connections usable. Any other error does not.
            if self._retry_at or not isinstance(error, ResponseError):
                await self._close(pair)
            if not isinstance(error, Exception):
                raise

    async def _open(self, reader: Any, receiver: Any) -> None:
        # redis-py gets the master from the Sentinels only in `connect`, not at the first command.
        await result_of(receiver.connect())
        await result_of(reader.connect())
        client_id = await _request(receiver, "CLIENT", "ID")
        await _request(receiver, "SUBSCRIBE", CHANNEL)
        await _request(reader, "CLIENT", "TRACKING", "ON", "REDIRECT", client_id)
        seconds, microseconds = await _request(reader, "TIME")
        self._transport.clock.read(int(seconds) * 1000 + int(microseconds) // 1000)
        listen = self._listen(reader, receiver)
        if self._is_async:
            self._listening = asyncio.ensure_future(listen)
        else:
            name = "idempotency-listener"
            threading.Thread(target=run_sync, args=(listen,), name=name, daemon=True).start()

    async def _listen(self, reader: Any, receiver: Any) -> None:
        """Receives until a connection is lost, or no call has waited for `IDLE_TIMEOUT`."""
        # `is_checked`: a PING was sent, and nothing has been received since.
        used_at, is_checked = monotonic(), False
        try:
            while monotonic() - used_at < IDLE_TIMEOUT:
                message = await self._receive(receiver, CHECK_INTERVAL)
                if self._watches:
                    used_at = monotonic()
                if message is None:
                    if is_checked:
                        raise RedisTimeoutError("the server did not reply")
                    await self._locked(lambda: _request(reader, "PING"))
                    await result_of(receiver.send_command("PING"))
                elif message[0] == b"message":
                    self._notify(message[2])
                is_checked = message is None
            # Each call that waited may have opened a connection of the transport.
            await self._transport.close_idle()
        except Exception as error:
            logger.debug("Waiting calls poll now, since a connection is lost: %r", error)
        finally:
            await self._close((reader, receiver))

    async def _receive(self, receiver: Any, timeout: float) -> Any:
        """Returns the next message, or None if none arrives within `timeout` seconds."""
        if self._is_async:
            return await result_of(receiver.read_response(timeout=timeout))
        return receiver.read_response() if receiver.can_read(timeout) else None

    def _notify(self, keys: list[bytes] | None) -> None:
        """Ends the waits for these records; None means all, after a flush."""
        with self._guard:
            changed = [
                self._watches.pop(key)
                for key in (tuple(self._watches) if keys is None else keys)
                if key in self._watches
            ]
        for watch in changed:
            watch.notify()

    async def _close(self, pair: tuple[Any, Any] | None) -> None:
        """Ends all waits, and closes these connections, unless others have replaced them."""
        if pair is None or self._pair != pair:
            return
        self._pair = None
        self._notify(None)
        for connection in pair:
            await result_of(connection.disconnect(True))

    async def aclose(self) -> None:
        """Ends all waits, and closes the connections."""
        await self._close(self._pair)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})


async def _request(connection: Any, *command: Any) -> Any:
    await result_of(connection.send_command(*command))
    return await result_of(connection.read_response())
