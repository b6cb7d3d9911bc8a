"""The transport through a redis-py client: for Redis Cluster and for a user's client.

It is slower than `ServerTransport`, but the client does all the work: it finds the node, follows a
moving slot, and runs whatever a user's subclass adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import AskError, NoScriptError, RedisClusterException, TryAgainError

from celery_idempotent.errors import SettingsError
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scripts import Script
from celery_idempotent.store.transport.connection import (
    NO_REPLY,
    ClosedConnectionError,
    aclose_client,
    connect,
    result_of,
)
from celery_idempotent.store.transport.server import BaseTransport, Call

#: Replies after which the call must be sent again: the script is not loaded, the slot is moving
#: (MovedError is an AskError), or there is no reply.
_NOT_EXECUTED = (NoScriptError, AskError, TryAgainError, *NO_REPLY)


class ClientTransport(BaseTransport):
    """Calls scripts through a client, which the first command creates.

    The timeout does not apply to the user's client, except on an event loop.

    Raises:
        SettingsError: if the config cannot be used from an event loop.
    """

    def __init__(self, config: StoreConfig, timeout: float | None = None, **options: bool) -> None:
        super().__init__(config, timeout, **options)
        if self.is_async and config.wait_replicas and config.client is None:
            raise SettingsError(
                "idempotency_wait_replicas cannot be used by async callers with a cluster: "
                "redis.asyncio does not send two commands on one connection"
            )
        close = None if config.borrows_client else aclose_client
        make = partial(connect, config, library=self._library)
        # Created lazily: a cluster's client connects at once.
        self._clients = self.scoped(
            partial(make, timeout=self.timeout, retries=int(self._retry)), close
        )
        self._batch_clients = self._clients
        if self.is_async and config.client is None:
            make()  # checks the config without opening a connection
            # Before a retry, a cluster's client closes the connections to all nodes; it cannot
            # open any while its first master is unavailable. Without retries, the other nodes
            # stay reachable.
            self._batch_clients = self.scoped(
                partial(make, timeout=self.timeout / 2, retries=0), close
            )

    async def call(
        self, script: Script, arguments: Sequence[Any], followup: Sequence[Any] = ()
    ) -> list[Any]:
        """See `ServerTransport`."""
        with suppress(ClosedConnectionError):
            return await self._call(script, arguments, followup)
        return await self._call(script, arguments, followup)

    async def _call(
        self, script: Script, arguments: Sequence[Any], followup: Sequence[Any]
    ) -> list[Any]:
        client = self._clients.get()
        if followup and not self._is_cluster(client):
            with suppress(NoScriptError):
                return await _send_together(client, script, arguments, followup)
        try:
            reply = await result_of(client.evalsha(script.sha, *arguments))
        except NoScriptError:
            reply = await result_of(client.eval(script.source, *arguments))
        if not followup:
            return [reply]
        # Resent with `followup` on one connection to the record's node: the script replies as it
        # did the first time, and WAIT refers to the writes of its own connection.
        try:
            return await _send_together(self._node(arguments[1]), script, arguments, followup)
        except AskError as error:
            # The slot is moving, and the record is already on the new node.
            node = client.get_redis_connection(client.get_node(error.host, error.port))
            return await _send_together(node, script, arguments, followup, asking=True)

    async def call_all(self, calls: Sequence[Call]) -> list[Any]:
        """See `ServerTransport`."""
        client = self._batch_clients.get()
        if self.is_async and self._is_cluster(client):
            await result_of(client.initialize(), self.timeout)
        by_node: dict[str, list[int]] = defaultdict(list)
        for index, (_, arguments) in enumerate(calls):
            by_node[self._node_name(client, arguments[1])].append(index)
        replies: list[Any] = [None] * len(calls)
        for indexes in by_node.values():
            node_replies = await self._send_batch(client, [calls[index] for index in indexes])
            for index, reply in zip(indexes, node_replies, strict=True):
                replies[index] = reply
        await self._resend(calls, by_node.values(), replies)
        if calls and all(isinstance(reply, NO_REPLY) for reply in replies):
            raise replies[0]
        return replies

    async def _send_batch(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """Sends calls to one node in one round trip; returns the replies, with errors as values.

        Raises:
            RedisError, OSError: if there is only one server, and it does not reply.
        """
        try:
            # A cluster pipeline of redis.asyncio finds the node itself.
            node = client if self.is_async else self._node(calls[0][1][1])
            pipeline = node.pipeline(transaction=False)
            for script, arguments in calls:
                pipeline.execute_command("EVALSHA", script.sha, *arguments)
            sent = pipeline.execute(raise_on_error=False)
            replies: list[Any] = await result_of(sent, self.timeout)
        except NO_REPLY as error:
            if not self._is_cluster(client):
                raise
            replies = [error] * len(calls)
        return replies

    async def _resend(
        self, calls: Sequence[Call], groups: Iterable[list[int]], replies: list[Any]
    ) -> None:
        """Resends the calls that were not executed, and sets their replies.

        Each is sent alone: only then does the client follow a moving slot, and find the new master
        if the one for these calls has failed. If there is none, the others of the group are not
        resent.
        """
        for group in groups:
            for index in group:
                if not isinstance(replies[index], _NOT_EXECUTED):
                    continue
                lost, replies[index] = replies[index], await self._reply_to(calls[index])
                if isinstance(replies[index], NO_REPLY):
                    break
                if isinstance(lost, NO_REPLY) and self._batch_clients is not self._clients:
                    await self._batch_clients.aclose()  # so that a new one finds the new master

    async def _reply_to(self, call: Call) -> Any:
        try:
            sent = self.call(*call)
            (reply,) = await (result_of(sent, self.timeout) if self.is_async else sent)
        except Exception as error:
            return error
        return reply

    async def ping(self) -> None:
        """See `ServerTransport`."""
        await result_of(self._clients.get().ping(), self.timeout)

    def server_of(self, name: str) -> str:
        """See `ServerTransport`."""
        return self._node_name(self._clients.get(), name)

    def pool_of(self, name: str) -> Any:
        """See `ServerTransport`."""
        node = self._node(name)
        # A cluster node of redis.asyncio has the attributes of a pool.
        return getattr(node, "connection_pool", node)

    def _node_name(self, client: Any, name: str) -> str:
        """Returns the name of the cluster node for a record; empty if there is none."""
        with suppress(RedisClusterException):  # no node has the slot
            return client.get_node_from_key(name).name if self._is_cluster(client) else ""
        return ""

    def _is_cluster(self, client: Any) -> bool:
        return isinstance(client, self._library.RedisCluster)

    def _node(self, name: str) -> Any:
        """Returns the client of the server that has the record of this name."""
        client = self._clients.get()
        if not self._is_cluster(client):
            return client
        node = client.get_node_from_key(name)
        return node if self.is_async else client.get_redis_connection(node)

    async def aclose(self) -> None:
        """See `ServerTransport`."""
        await self._clients.aclose()
        await self._batch_clients.aclose()


async def _send_together(
    node: Any,
    script: Script,
    arguments: Sequence[Any],
    followup: Sequence[Any],
    *,
    asking: bool = False,
) -> list[Any]:
    pipeline = node.pipeline(transaction=False)
    if asking:
        pipeline.execute_command("ASKING")
    pipeline.execute_command("EVALSHA", script.sha, *arguments)
    pipeline.execute_command(*followup)
    replies: list[Any] = await result_of(pipeline.execute())
    return replies[-2:]
