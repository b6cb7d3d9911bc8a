"""The blocking transport through a redis-py client: for Redis Cluster and for a user's client.

It is slower than `SyncTransport`, but the client does all of its work: it finds the node, follows
a slot that moves, and runs whatever a user's subclass adds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from redis import Redis, RedisCluster
from redis.exceptions import AskError, NoScriptError, RedisClusterException, TryAgainError

from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.transport.connection import NO_REPLY, close_client, connect
from celery_idempotent.store.transport.per_process import PerProcess
from celery_idempotent.store.transport.sync import SyncConnection
from celery_idempotent.store.transport.transport import Scope, ScriptCall

T = TypeVar("T")

#: Replies after which the call has to be sent again: the script is not loaded, or the slot moves
#: (MovedError is an AskError).
_NOT_EXECUTED = (NoScriptError, AskError, TryAgainError)


class ClientTransport:
    """Calls scripts through a client, which is made with the first command.

    Args:
        timeout: seconds that a command may take; the config's by default. It does not apply to a
            client that the user gave.
        retry: resend a command whose reply does not arrive in half of that time.
    """

    shares_connections = False

    def __init__(
        self, config: StoreConfig, timeout: float | None = None, *, retry: bool = True
    ) -> None:
        self._config = config
        self._timeout = timeout
        self._retry = retry
        self._connected_client: Any = None

    @property
    def _client(self) -> Any:
        # Not in __init__: a cluster's client connects as it is made.
        if self._connected_client is None:
            self._connected_client = connect(
                self._config, timeout=self._timeout, retries=int(self._retry)
            )
        return self._connected_client

    async def call(self, call: ScriptCall, followup: Sequence[Any] = ()) -> list[Any]:
        """See `Transport`."""
        script, name, arguments, keys = call
        try:
            reply = self._client.evalsha(script.sha, keys, name, *arguments)
        except NoScriptError:
            reply = self._client.eval(script.source, keys, name, *arguments)
        return self._call_again(call, followup) if followup else [reply]

    def _call_again(self, call: ScriptCall, followup: Sequence[Any]) -> list[Any]:
        """Resends `call` with `followup` behind it, on one connection to the record's node.

        The client has found the node and loaded the script by then. The script replies as it did
        the first time, and WAIT refers to the writes of its own connection.
        """
        try:
            return _send_together(self._node_client(call.name), call, followup)
        except AskError as error:
            # The slot is being moved, and the record is at the new node already.
            cluster = self._client
            node = cluster.get_redis_connection(cluster.get_node(error.host, error.port))
            return _send_together(node, call, followup, asking=True)

    async def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """See `Transport`."""
        replies: list[Any] = [None] * len(calls)
        resend: list[int] = []
        for indexes in self._send_to_nodes(calls, range(len(calls)), replies):
            # The client finds the new master if this one has failed.
            reply = await self._reply_to(calls[indexes[0]])
            if not isinstance(reply, NO_REPLY):
                replies[indexes[0]] = reply
                resend += indexes[1:]
        self._send_to_nodes(calls, resend, replies)
        if calls and all(isinstance(reply, NO_REPLY) for reply in replies):
            raise replies[0]
        for index, reply in enumerate(replies):
            if isinstance(reply, _NOT_EXECUTED):
                replies[index] = await self._reply_to(calls[index])
        return replies

    def _send_to_nodes(
        self, calls: Sequence[ScriptCall], indexes: Iterable[int], replies: list[Any]
    ) -> list[list[int]]:
        """Sends the calls of `indexes`, and sets their replies.

        Returns:
            The indexes of the calls to each node of a cluster that has not replied.
        """
        nodes: dict[int, Any] = {}
        indexes_by_node: dict[int, list[int]] = defaultdict(list)
        for index in indexes:
            try:
                node = self._node_client(calls[index].name)
            except RedisClusterException as error:  # no node has the slot
                replies[index] = error
                continue
            nodes[id(node)] = node
            indexes_by_node[id(node)].append(index)
        failed = []
        for node_id, node_indexes in indexes_by_node.items():
            pipeline = nodes[node_id].pipeline(transaction=False)
            for index in node_indexes:
                script, name, arguments, keys = calls[index]
                pipeline.evalsha(script.sha, keys, name, *arguments)
            try:
                node_replies = pipeline.execute(raise_on_error=False)
            except NO_REPLY as error:
                if not isinstance(self._client, RedisCluster):
                    raise
                node_replies = [error] * len(node_indexes)
                failed.append(node_indexes)
            for index, reply in zip(node_indexes, node_replies, strict=True):
                replies[index] = reply
        return failed

    async def _reply_to(self, call: ScriptCall) -> Any:
        try:
            (reply,) = await self.call(call)
        except Exception as error:
            return error
        return reply

    async def ping(self) -> None:
        """See `Transport`."""
        self._client.ping()

    async def sleep(self, seconds: float) -> None:
        """See `Transport`."""
        time.sleep(seconds)

    def with_timeout(self, timeout: float, *, retry: bool = True) -> ClientTransport:
        """See `Transport`."""
        return ClientTransport(self._config, timeout, retry=retry)

    def scoped(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> Scope[T]:
        """See `Transport`."""
        return PerProcess(make, close)

    def server_of(self, name: str) -> str:
        """See `Transport`."""
        client = self._client
        return client.get_node_from_key(name).name if isinstance(client, RedisCluster) else ""  # type: ignore[no-untyped-call]

    def connection_to(self, name: str) -> SyncConnection:
        """See `Transport`."""
        return SyncConnection(self._node_client(name).connection_pool)

    def _node_client(self, name: str) -> Any:
        """Returns the client of the server that has the record of this name."""
        client = self._client
        if not isinstance(client, RedisCluster):
            return client
        node = client.get_node_from_key(name)  # type: ignore[no-untyped-call]
        return client.get_redis_connection(node)

    async def aclose(self) -> None:
        """See `Transport`."""
        client, self._connected_client = self._connected_client, None
        if client is not None and not self._config.borrows_client:
            close_client(client)


def _send_together(
    node: Redis, call: ScriptCall, followup: Sequence[Any], *, asking: bool = False
) -> list[Any]:
    pipeline: Any = node.pipeline(transaction=False)
    if asking:
        pipeline.execute_command("ASKING")
    pipeline.evalsha(call.script.sha, call.keys, call.name, *call.arguments)
    pipeline.execute_command(*followup)
    replies: list[Any] = pipeline.execute()
    return replies[-2:]
