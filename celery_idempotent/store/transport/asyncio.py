"""The transport of event loops, through a client of redis.asyncio."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError, SlotNotCoveredError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.errors import SettingsError
from celery_idempotent.store import replicas
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.transport.connection import (
    NO_REPLY,
    ClientClasses,
    connect,
    sentinels_of,
)
from celery_idempotent.store.transport.per_loop import PerLoop
from celery_idempotent.store.transport.sync import tracking_options
from celery_idempotent.store.transport.transport import Scope, ScriptCall
from celery_idempotent.store.transport.url import names_cluster

ASYNCIO = ClientClasses(
    "redis.asyncio", redis.asyncio.Redis, redis.asyncio.RedisCluster, ClusterNode, Sentinel, Retry
)

#: What redis-py up to 8.1 raises where a connection is closed during a call: errors of Python's
#: own, which do not mention a connection (redis-py#4287).
CLOSED_CONNECTION_ERRORS = (AttributeError, TypeError)

T = TypeVar("T")
P = ParamSpec("P")


def resends_once(send: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorates a method: what was sent on a connection that was closing is sent once more."""

    @wraps(send)
    async def send_twice(*args: P.args, **kwargs: P.kwargs) -> T:
        with suppress(*CLOSED_CONNECTION_ERRORS):
            return await send(*args, **kwargs)
        try:
            return await send(*args, **kwargs)
        except CLOSED_CONNECTION_ERRORS as error:
            raise RedisConnectionError(f"the connection was closed: {error}") from error

    return send_twice


class AsyncioTransport:
    """A client for each event loop, since connections belong to a loop.

    Args:
        clients: those of another transport, which closes them: for single calls, for batches.
        timeout: seconds that a ping or a batch of calls may take. By default the config's limits a
            batch, and redis-py's own timeouts limit a ping.

    Raises:
        SettingsError: if the config is invalid, or cannot be used from an event loop.
    """

    shares_connections = True

    def __init__(
        self,
        config: StoreConfig,
        *,
        clients: tuple[PerLoop[Any], PerLoop[Any]] | None = None,
        timeout: float | None = None,
    ) -> None:
        if replicas.wanted(config) and names_cluster(config.url):
            raise SettingsError(
                "idempotency_wait_replicas cannot be used by async callers with a cluster: "
                "redis.asyncio does not send two commands on one connection"
            )
        if config.client is None and clients is None:
            connect(config, classes=ASYNCIO)  # checks the config, and opens no connection
        self._config = config
        self._timeout = timeout
        self._owns_clients = clients is None
        self._clients, self._batch_clients = clients or _new_clients(config)
        self._batch_timeout = config.timeout if timeout is None else timeout

    @resends_once
    async def call(self, call: ScriptCall, followup: Sequence[Any] = ()) -> list[Any]:
        """See `Transport`."""
        script, name, arguments, keys = call
        client = self._clients.get()
        if followup:
            replies = await self._send_together([call], followup)
            if isinstance(replies[0], NoScriptError):
                await client.script_load(script.source)
                replies = await self._send_together([call], followup)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies
        try:
            return [await client.evalsha(script.sha, keys, name, *arguments)]
        except NoScriptError:
            return [await client.eval(script.source, keys, name, *arguments)]

    async def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """See `Transport`."""
        client = self._batch_clients.get()
        if not isinstance(client, ASYNCIO.cluster):
            return await _limited(self._call_all(calls), self._batch_timeout)
        replies: list[Any] = [None] * len(calls)
        resend: list[int] = []
        failed = await self._send_to_nodes(calls, range(len(calls)), replies)
        for indexes in failed:
            # This client finds the new master if that of these calls has failed.
            reply = await self._reply_to(calls[indexes[0]])
            if not isinstance(reply, NO_REPLY):
                replies[indexes[0]] = reply
                resend += indexes
        if resend:
            await client.aclose()  # so that it finds the new master, too
            with suppress(*NO_REPLY):
                await self._send_to_nodes(calls, resend, replies)
        if calls and all(isinstance(reply, NO_REPLY) for reply in replies):
            raise replies[0]
        return replies

    async def _send_to_nodes(
        self, calls: Sequence[ScriptCall], indexes: Iterable[int], replies: list[Any]
    ) -> list[list[int]]:
        """Sends the calls of `indexes` to a cluster, and sets their replies.

        Returns:
            The indexes of the calls to each node that has not replied.
        """
        client = self._batch_clients.get()
        await _limited(client.initialize(), self._batch_timeout)
        indexes_by_node: dict[str, list[int]] = defaultdict(list)
        for index in indexes:
            indexes_by_node[_node_name(client, calls[index].name)].append(index)
        groups = list(indexes_by_node.values())
        results = await asyncio.gather(
            *(
                _limited(self._call_all([calls[index] for index in group]), self._batch_timeout)
                for group in groups
            ),
            return_exceptions=True,
        )
        failed = []
        for group, result in zip(groups, results, strict=True):
            if isinstance(result, NO_REPLY):
                failed.append(group)
            elif isinstance(result, BaseException):
                raise result
            each = [result] * len(group) if isinstance(result, NO_REPLY) else result
            for index, reply in zip(group, each, strict=True):
                replies[index] = reply
        return failed

    async def _reply_to(self, call: ScriptCall) -> Any:
        try:
            (reply,) = await _limited(self.call(call), self._batch_timeout)
        except Exception as error:
            return error
        return reply

    @resends_once
    async def _call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        replies = await self._send_together(calls)
        # A connection may just have been stale.
        lost = [n for n, reply in enumerate(replies) if isinstance(reply, RedisConnectionError)]
        if lost:
            with suppress(*NO_REPLY):
                resent = await self._send_together([calls[n] for n in lost])
                for n, reply in zip(lost, resent, strict=True):
                    replies[n] = reply
            if all(isinstance(reply, RedisConnectionError) for reply in replies):
                raise replies[0]
        unknown = [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            # EVAL also loads a script; SCRIPT LOAD would need every node of a cluster.
            first_calls = {calls[n].script.sha: calls[n] for n in reversed(unknown)}
            for script, name, arguments, keys in first_calls.values():
                with suppress(ResponseError):
                    await self._batch_clients.get().eval(script.source, keys, name, *arguments)
            resent = await self._send_together([calls[n] for n in unknown])
            for n, reply in zip(unknown, resent, strict=True):
                replies[n] = reply
                if isinstance(reply, NoScriptError):  # its slot has moved to another node
                    with suppress(ResponseError):
                        (replies[n],) = await self.call(calls[n])
        return replies

    async def _send_together(
        self, calls: Sequence[ScriptCall], followup: Sequence[Any] = ()
    ) -> list[Any]:
        client = self._batch_clients.get()
        cluster = isinstance(client, ASYNCIO.cluster)
        pipeline = client.pipeline() if cluster else client.pipeline(transaction=False)
        for script, name, arguments, keys in calls:
            # A cluster's pipeline has no evalsha method.
            pipeline.execute_command("EVALSHA", script.sha, keys, name, *arguments)
        if followup:
            pipeline.execute_command(*followup)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    async def ping(self) -> None:
        """See `Transport`."""
        await (self._ping() if self._timeout is None else _limited(self._ping(), self._timeout))

    @resends_once
    async def _ping(self) -> None:
        await self._clients.get().ping()

    async def sleep(self, seconds: float) -> None:
        """See `Transport`."""
        await asyncio.sleep(seconds)

    def with_timeout(self, timeout: float, *, retry: bool = True) -> AsyncioTransport:
        """See `Transport`. It limits pings and batches, and shares the clients of this one."""
        clients = self._clients, self._batch_clients
        return AsyncioTransport(self._config, clients=clients, timeout=timeout)

    def scoped(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> Scope[T]:
        """See `Transport`."""
        return PerLoop(make, close)

    def server_of(self, name: str) -> str:
        """See `Transport`."""
        node = self._node(name)
        return "" if node is None else node.name

    def connection_to(self, name: str) -> AsyncioConnection:
        """See `Transport`."""
        # A cluster's node has the attributes of a pool.
        return AsyncioConnection(self._node(name) or self._clients.get().connection_pool)

    def _node(self, name: str) -> Any:
        client = self._clients.get()
        return client.get_node_from_key(name) if isinstance(client, ASYNCIO.cluster) else None

    async def aclose(self) -> None:
        """Closes the running loop's connections; the next command opens others."""
        if self._owns_clients:
            await self._clients.aclose()
            await self._batch_clients.aclose()


class AsyncioConnection:
    """A `ServerConnection` of the running event loop, with the options of a pool's connections."""

    def __init__(self, pool: Any) -> None:
        self._connection = pool.connection_class(**tracking_options(pool.connection_kwargs))

    async def connect(self) -> None:
        """See `ServerConnection`."""
        await _translated(self._connection.connect())

    async def request(self, *command: Any) -> Any:
        """See `ServerConnection`."""
        await _translated(self._connection.send_command(*command))
        return await _translated(self._connection.read_response())

    async def read(self, timeout: float) -> Any:
        """See `ServerConnection`."""
        return await _translated(self._connection.read_response(timeout=timeout))

    async def aclose(self) -> None:
        """See `ServerConnection`."""
        await self._connection.disconnect(nowait=True)


def _new_clients(config: StoreConfig) -> tuple[PerLoop[Any], PerLoop[Any]]:
    """Returns the clients for single calls, and those for batches."""
    close = None if config.borrows_client else _close_client
    clients: PerLoop[Any] = PerLoop(lambda: connect(config, classes=ASYNCIO), close)
    if config.client is not None or not names_cluster(config.url):
        return clients, clients
    # A cluster's client closes the connections to all nodes before it retries, and cannot open any
    # while its first master is unavailable. Without retries the other nodes stay reachable.
    timeout = config.timeout / 2
    return clients, PerLoop(
        lambda: connect(config, timeout=timeout, retries=0, classes=ASYNCIO), close
    )


def _node_name(client: Any, name: str) -> str:
    """Returns the name of the cluster's node that has the record; empty if none has its slot."""
    try:
        return str(client.get_node_from_key(name).name)
    except SlotNotCoveredError:
        return ""


async def _translated(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    except asyncio.TimeoutError as error:  # not an OSError before Python 3.11
        raise RedisTimeoutError("Redis did not reply in time") from error
    except CLOSED_CONNECTION_ERRORS as error:
        raise RedisConnectionError(f"the connection was closed: {error}") from error


async def _limited(awaitable: Awaitable[T], timeout: float) -> T:
    try:
        return await asyncio.wait_for(awaitable, timeout)
    except asyncio.TimeoutError as error:
        raise RedisTimeoutError(f"no reply within {timeout:g} s") from error


async def _close_client(client: Any) -> None:
    for each in (client, *sentinels_of(client)):
        close = getattr(each, "aclose", each.close)  # redis-py 5.0.1 renamed it
        await close()
