"""The base of all transports, and the transport to a single server or a Sentinel master.

The latter uses redis-py's connections without its client. For every command, the client polls the
socket for a closed connection, takes locks and records metrics, which takes longer than Redis does.
Here, a command that fails on a closed connection is resent.
"""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.store import scripts
from celery_idempotent.core.store.clock import Deadline, ServerClock
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.transport.connection import aclose_client, connect, result_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_idempotent.core.store.transport.per_loop import PerLoop

T = TypeVar("T")


class BaseTransport:
    """Base of both transports, which send commands to Redis and return the replies.

    The methods of a blocking transport never suspend, so `run_sync` can run them. A command may
    reach the server more than once: see :class:`celery_idempotent.core.store.commands.Command`.

    Args:
        timeout: seconds that a command may take, resends included; the config's by default.
        is_async: for event loops; each loop has its own connections.
        retry: resend a command whose reply does not arrive within half the timeout.
    """

    def __init__(
        self,
        config: StoreConfig,
        timeout: float | None = None,
        *,
        is_async: bool = False,
        retry: bool = True,
        clock: ServerClock | None = None,
    ) -> None:
        self.config = config
        #: The server's clock, which all transports to that server share.
        self.clock = clock or ServerClock()
        self.is_async = is_async
        self.timeout = config.timeout if timeout is None else timeout
        self._retry = retry
        self._library: Any = redis.asyncio if is_async else redis

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        if self.is_async:
            await asyncio.sleep(seconds)
        else:
            time.sleep(seconds)

    async def close_idle(self) -> None:
        """Closes the connections that no call uses, as far as redis-py can."""

    def with_timeout(self, timeout: float, *, retry: bool = True) -> Self:
        """Returns a transport with connections of its own, and with another timeout."""
        options: Any = {"is_async": self.is_async, "retry": retry, "clock": self.clock}
        return type(self)(self.config, timeout, **options)

    def scoped(
        self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None
    ) -> PerLoop[T] | PerProcess[T]:
        """Returns a scope whose values may hold connections of this transport."""
        if not self.is_async:
            return PerProcess(make, close)
        from celery_idempotent.core.store.transport.per_loop import PerLoop

        return PerLoop(make, close)


#: Maximum connections of one process or event loop. A call has a connection of its own; further
#: calls wait for one.
MAX_CONNECTIONS = 100


class _Semaphore:
    """Limits the calls that use a connection to `MAX_CONNECTIONS`."""

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        #: When a call last got a reply (seconds of `monotonic`).
        self._replied_at = 0.0
        #: One item for each call that may still begin. `threading.Semaphore` takes ten times as
        #: long.
        self._permits: Any = asyncio.Queue() if is_async else queue.SimpleQueue()
        for _ in range(MAX_CONNECTIONS):
            self._permits.put_nowait(None)

    async def acquire(self, timeout: float) -> None:
        """Waits until another call may begin.

        Raises:
            RedisTimeoutError: if no call has got a reply for `timeout` seconds.
        """
        try:
            self._permits.get_nowait()
        except (queue.Empty, asyncio.QueueEmpty):
            await self._wait(timeout)

    async def _wait(self, timeout: float) -> None:
        """Waits for a permit, as long as other calls get replies; see `acquire`."""
        since = monotonic()
        if self._is_async:
            await self._permits.get()
        while not self._is_async:
            try:
                self._permits.get(timeout=timeout)
                break
            except queue.Empty:
                self._check(since, timeout)
        try:
            self._check(since, timeout)
        except RedisTimeoutError:
            self._permits.put_nowait(None)
            raise

    def _check(self, since: float, timeout: float) -> None:
        if monotonic() - max(since, self._replied_at) > timeout:
            raise RedisTimeoutError(f"none of {MAX_CONNECTIONS} connections got a reply")

    def release(self, *, replied: bool) -> None:
        """Lets another call begin, after one that has got a reply or not."""
        if replied:
            self._replied_at = monotonic()
        self._permits.put_nowait(None)


#: Seconds before each resend. The first is immediate: the connection may just have been stale.
RESEND_DELAYS = (0.0, 0.1)


class ServerTransport(BaseTransport):
    """A pool of connections for any number of threads; reuses the last used connection first.

    Raises:
        SettingsError: if the config is invalid.
    """

    def __init__(self, config: StoreConfig, timeout: float | None = None, **options: Any) -> None:
        super().__init__(config, timeout, **options)
        wait = self.timeout / 2 if self._retry else self.timeout
        make = partial(_Pool, config, wait, self._library, self.clock)
        make()  # checks the config without opening a connection
        self._pool = self.scoped(make, _Pool.aclose)

    async def send(
        self,
        *commands: Sequence[Any],
        followup: Sequence[Any] = (),
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """Sends `commands` in one round trip; returns the replies, with errors as values.

        If the server has not loaded a script, all are sent once more. To a cluster, the calls of
        scripts take one round trip for each node that has a record. If only some of these nodes
        reply, the errors of the others are also values.

        Args:
            followup: a command to send after a single call, on the same connection.
            deadline: is among the arguments of `commands`; each copy gets another.

        Raises:
            RedisError, OSError: if no server replies, even after all resends.
        """
        if followup:
            commands = *commands, followup
        started_at = monotonic()
        for delay in (*RESEND_DELAYS, None):
            replies: list[Any] = []
            pool = self._pool.get()
            await pool.semaphore.acquire(self.timeout)
            try:
                replies = await pool.send(commands)
                break
            except (RedisConnectionError, RedisTimeoutError, ReadOnlyError):
                # The idle connections have most likely been lost with this one. Left in the pool,
                # each would cost a later command a resend.
                await pool.close_idle()
                if delay is None or monotonic() - started_at > 0.6 * self.timeout:
                    raise
            finally:
                pool.semaphore.release(replied=bool(replies))
            await self.sleep(max(delay, deadline.left() if deadline else 0.0))
        # The server has forgotten its scripts: it was restarted, or is a new master.
        if NoScriptError in map(type, replies) and (loading := with_sources(commands)) != commands:
            return await self.send(*loading, deadline=deadline)
        return replies

    async def ping(self, node: str = "") -> None:
        """Checks that the server replies, or a node of a cluster.

        Raises:
            RedisError, OSError: if it does not.
        """
        (reply,) = await self.send(("PING",))
        if isinstance(reply, Exception):
            raise reply

    async def send_unread(self, command: Sequence[Any]) -> None:
        """Sends a command once, without waiting for its reply.

        The next command on the connection reads that reply and ignores it. The command may be lost.
        """
        await self._pool.get().send((command,), wait=False)

    async def close_idle(self) -> None:
        """See `BaseTransport`."""
        await self._pool.get().close_idle()

    def pool_of(self, name: str) -> Any:
        """Returns redis-py's connection pool for the server that has the record `name`."""
        return self._pool.get().pool

    async def aclose(self) -> None:
        """Closes the connections (of the running loop); the next command reconnects."""
        await self._pool.aclose()


class _Pool:
    """The connections of a process or an event loop."""

    def __init__(
        self, config: StoreConfig, timeout: float, library: Any, clock: ServerClock
    ) -> None:
        self._clock, self._is_async = clock, library is redis.asyncio
        self.semaphore = _Semaphore(is_async=self._is_async)
        self._client = connect(config, timeout=timeout, retries=0, library=library)
        # It is used for its options only. Since redis-py 8, its ``make_connection`` counts all
        # connections that it has made, even lost ones, and refuses more than a limit.
        self.pool = self._client.connection_pool
        #: The connections that no call uses, each with the number of replies still to be dropped.
        self.idle: list[tuple[Any, int]] = []
        #: Whether `aclose` was called: a connection that is still in use is closed after its call.
        self.closed = False

    async def send(self, commands: Sequence[Sequence[Any]], *, wait: bool = True) -> list[Any]:
        """Sends commands once; without `wait`, the replies are dropped by the next call."""
        count = len(commands)
        try:
            connection, unread = self.idle.pop()
        except IndexError:
            connection, unread = await self._connect(), 0
        replies: list[Any] = []
        # Packed only now that there is a connection, because deadlines begin when they are packed.
        packed = b"".join(map(pack, commands))
        try:
            sent = connection.send_packed_command([packed], check_health=False)
            if self._is_async:
                await sent
            while wait and len(replies) < count:
                try:
                    reply = connection.read_response(disable_decoding=True)
                    if self._is_async:
                        reply = await reply
                except ResponseError as error:
                    if isinstance(error, ReadOnlyError) and not unread:
                        raise
                    reply = error
                if isinstance(reply, list) and reply and isinstance(reply[0], bytes):
                    # A RESP3 push message, which redis-py before 6 with hiredis returns like a
                    # reply. No command sent here replies with such a list.
                    continue
                if unread:
                    unread -= 1
                else:
                    replies.append(reply)
        except BaseException:
            # A reply may still arrive, and the next command would read it as its own.
            await result_of(connection.disconnect(True))
            raise
        self.idle.append((connection, 0 if wait else unread + count))
        if self.closed:  # by another thread, during this call
            await self.close_idle()
        return replies

    async def _connect(self) -> Any:
        """Returns a new connection, after reading the server's time by it."""
        connection = self.pool.connection_class(**self.pool.connection_kwargs)
        await result_of(connection.connect())
        try:
            await result_of(connection.send_command("TIME"))
            seconds, microseconds = await result_of(connection.read_response(disable_decoding=True))
            self._clock.read(int(seconds) * 1000 + int(microseconds) // 1000)
        except BaseException:
            await result_of(connection.disconnect(True))
            raise
        return connection

    async def close_idle(self, *, nowait: bool = True) -> None:
        while True:
            try:
                connection, _ = self.idle.pop()
            except IndexError:  # no check before `pop`: another thread may take the last one
                return
            await result_of(connection.disconnect(nowait))

    async def aclose(self) -> None:
        self.closed = True
        await self.close_idle(nowait=False)
        await aclose_client(self._client)


def with_sources(commands: tuple[Sequence[Any], ...]) -> tuple[Sequence[Any], ...]:
    """Returns `commands` with the source in the first call of each script, which loads it."""
    sources = dict(scripts.sources)
    return tuple(
        ("EVAL", source, *command[2:])
        if command[0] == "EVALSHA" and (source := sources.pop(command[1], None))
        else command
        for command in commands
    )


#: The bytes before an argument, by its size. The first line break ends the argument before it.
_SIZES = [b"\r\n$%d\r\n" % size for size in range(256)]


def pack(command: Sequence[Any]) -> bytes:
    """Encodes a command as an array of bulk strings.

    redis-py's encoder has the same result but takes several times as long.
    """
    parts = [b"*%d" % len(command)]
    for argument in command:
        data = argument if type(argument) is bytes else str(argument).encode()
        size = len(data)
        parts += _SIZES[size] if size < 256 else b"\r\n$%d\r\n" % size, data
    parts.append(b"\r\n")
    return b"".join(parts)


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
