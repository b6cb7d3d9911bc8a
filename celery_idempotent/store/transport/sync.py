"""The blocking transport to a single server.

It uses redis-py's connections without redis-py's client. For every command the client polls the
socket for a closed connection, takes locks and records metrics, which takes longer than Redis does.
Here a closed connection is detected when a command fails on it; the command is then resent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.clock import monotonic
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.transport.connection import close_client, connect
from celery_idempotent.store.transport.per_process import PerProcess
from celery_idempotent.store.transport.transport import Scope, ScriptCall

T = TypeVar("T")

#: Seconds before each resend. The first is immediate: the connection may just have been stale.
RESEND_DELAYS = (0.0, 0.1)


class SyncTransport:
    """A pool of connections for any number of threads; the connection used last is reused first.

    Args:
        timeout: seconds that a command may take, resends included; the config's by default.
        retry: resend a command whose reply does not arrive in half of that time.

    Raises:
        SettingsError: if the config is invalid.
    """

    shares_connections = False

    def __init__(
        self, config: StoreConfig, timeout: float | None = None, *, retry: bool = True
    ) -> None:
        self._config = config
        self._timeout = config.timeout if timeout is None else timeout
        wait = self._timeout / 2 if retry else self._timeout
        self._client = connect(config, timeout=wait, retries=0)
        # The pool's make_connection is not used: from redis-py 8 on it counts the connections that
        # it has made, lost ones included, and refuses beyond a limit.
        self._pool = self._client.connection_pool
        #: Connections, each with the number of replies on it that nobody waits for.
        self._idle: list[tuple[Any, int]] = []

    async def call(self, call: ScriptCall, followup: Sequence[Any] = ()) -> list[Any]:
        """See `Transport`."""
        script, name, arguments, keys = call
        followups = (followup,) if followup else ()
        replies = self.send(("EVALSHA", script.sha, keys, name, *arguments), *followups)
        if isinstance(replies[0], NoScriptError):
            # The server was flushed or restarted, or it is a new master. EVAL also loads a script.
            replies = self.send(("EVAL", script.source, keys, name, *arguments), *followups)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """See `Transport`."""
        replies = self.send(
            *(("EVALSHA", c.script.sha, c.keys, c.name, *c.arguments) for c in calls)
        )
        unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            loaded = set()
            commands: list[Sequence[Any]] = []
            for script, name, arguments, keys in (calls[n] for n in unknown):
                # The first call of a script loads it for the others.
                first = script.sha not in loaded
                loaded.add(script.sha)
                head = ("EVAL", script.source) if first else ("EVALSHA", script.sha)
                commands.append((*head, keys, name, *arguments))
            for n, reply in zip(unknown, self.send(*commands), strict=True):
                replies[n] = reply
        return replies

    async def ping(self) -> None:
        """See `Transport`."""
        (reply,) = self.send(("PING",))
        if isinstance(reply, Exception):
            raise reply

    def send(self, *commands: Sequence[Any]) -> list[Any]:
        """Sends `commands` in one round trip and returns the replies; error replies are values.

        Raises:
            RedisError, OSError: if a reply is missing after all resends.
        """
        started_at = monotonic()
        for delay in (*RESEND_DELAYS, None):
            try:
                return self._send_once(commands)
            except (RedisConnectionError, RedisTimeoutError, ReadOnlyError):
                # The other idle connections have most likely been lost with this one.
                self._idle.clear()
                if delay is None or monotonic() - started_at > 0.6 * self._timeout:
                    raise
                time.sleep(delay)
        raise AssertionError("unreachable")

    def post(self, command: Sequence[Any]) -> None:
        """Sends `command` without waiting: the next command on the connection drops its reply.

        It may be lost, and an error reply is ignored.

        Raises:
            RedisError, OSError: if it cannot be sent.
        """
        self._send_once((command,), wait=False)

    def _send_once(self, commands: Sequence[Sequence[Any]], *, wait: bool = True) -> list[Any]:
        try:
            connection, unread = self._idle.pop()
        except IndexError:
            connection, unread = self._open_connection(), 0
        if connection.pid != os.getpid():  # it belongs to the parent of this fork
            connection, unread = self._open_connection(), 0
        replies: list[Any] = []
        try:
            packed = b"".join(map(pack, commands))
            connection.send_packed_command([packed], check_health=False)
            while wait and len(replies) < len(commands):
                try:
                    reply = connection.read_response(disable_decoding=True)
                except ResponseError as error:
                    if isinstance(error, ReadOnlyError) and not unread:
                        raise
                    reply = error
                if isinstance(reply, list) and is_push(reply):
                    continue
                if unread:
                    unread -= 1
                else:
                    replies.append(reply)
        except BaseException:
            # After an interruption a reply may still arrive; no other command must read it.
            connection.disconnect()
            raise
        self._idle.append((connection, 0 if wait else unread + len(commands)))
        return replies

    def _open_connection(self) -> Any:
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        connection.connect()
        return connection

    async def sleep(self, seconds: float) -> None:
        """See `Transport`."""
        time.sleep(seconds)

    def with_timeout(self, timeout: float, *, retry: bool = True) -> SyncTransport:
        """See `Transport`."""
        return SyncTransport(self._config, timeout, retry=retry)

    def scoped(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> Scope[T]:
        """See `Transport`."""
        return PerProcess(make, close)

    def server_of(self, name: str) -> str:
        """See `Transport`."""
        return ""

    def connection_to(self, name: str) -> SyncConnection:
        """See `Transport`."""
        return SyncConnection(self._pool)

    async def aclose(self) -> None:
        """See `Transport`."""
        while self._idle:
            connection, _ = self._idle.pop()
            if connection.pid == os.getpid():
                connection.disconnect()
        close_client(self._client)


def is_push(reply: list[Any]) -> bool:
    """Returns whether `reply` is a push message of RESP3, which is not a reply to a command.

    redis-py before 6 with hiredis returns one like a reply. No command that is sent here has a
    reply that is a list and begins with text.
    """
    return bool(reply) and isinstance(reply[0], bytes)


#: What precedes an argument of each size. The line break ends the argument before it.
_SIZES = [b"\r\n$%d\r\n" % size for size in range(256)]


def pack(command: Sequence[Any]) -> bytes:
    """Encodes a command as an array of bulk strings.

    redis-py's encoding has the same result and takes several times as long.
    """
    parts = [b"*%d" % len(command)]
    for argument in command:
        data = argument if type(argument) is bytes else str(argument).encode()
        size = len(data)
        parts += _SIZES[size] if size < 256 else b"\r\n$%d\r\n" % size, data
    parts.append(b"\r\n")
    return b"".join(parts)


class SyncConnection:
    """A blocking `ServerConnection`, with the options of a pool's connections."""

    def __init__(self, pool: Any) -> None:
        self._connection = pool.connection_class(**tracking_options(pool.connection_kwargs))

    async def connect(self) -> None:
        """See `ServerConnection`."""
        self._connection.connect()

    async def request(self, *command: Any) -> Any:
        """See `ServerConnection`."""
        self._connection.send_command(*command)
        return self._connection.read_response()

    async def read(self, timeout: float) -> Any:
        """See `ServerConnection`."""
        if self._connection.can_read(timeout):
            return self._connection.read_response()
        return None

    async def aclose(self) -> None:
        """See `ServerConnection`."""
        self._connection.disconnect()


#: redis-py before 5 has RESP2 only.
_RESP2 = {"protocol": 2} if int(redis.__version__.partition(".")[0]) >= 5 else {}
#: Options that redis-py 8 rejects together with RESP2.
_RESP3_OPTIONS = ("maint_notifications", "oss_cluster_maint_notifications")


def tracking_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a connection's `options` for RESP2, in which invalidations are ordinary messages."""
    return {n: value for n, value in options.items() if not n.startswith(_RESP3_OPTIONS)} | _RESP2
