"""The transport through a redis-py client: for Redis Cluster and for a user's client.

It is slower than `ServerTransport`, but the client does all the work: it finds the node, follows a
moving slot, and runs whatever a user's subclass adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import AskError, NoScriptError, RedisClusterException, TryAgainError

from celery_idempotent.core.store.clock import Deadline
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.transport.connection import (
    NO_REPLY,
    ClosedConnectionError,
    aclose_client,
    connect,
    result_of,
)
from celery_idempotent.core.store.transport.server import BaseTransport, with_sources
from celery_idempotent.core.store.transport.user_code import of_client
from celery_idempotent.errors import SettingsError

#: Replies after which `_resend` sends a call again: the script is not loaded, the slot is moving
#: (MovedError is an AskError), or there is no reply.
_NOT_EXECUTED = (NoScriptError, AskError, TryAgainError, *NO_REPLY)


class ClientTransport(BaseTransport):
    """Calls scripts through a client, which the first command creates.

    The timeout does not apply to the user's client, except on an event loop.

    Raises:
        SettingsError: if the config cannot be used from an event loop.
    """

    def __init__(self, config: StoreConfig, timeout: float | None = None, **options: Any) -> None:
        super().__init__(config, timeout, **options)
        if self.is_async and config.wait_replicas and config.client is None:
            raise SettingsError(
                "idempotency_wait_replicas cannot be used by async callers with a cluster: "
                "redis.asyncio does not send two commands on one connection"
            )
        close = None if config.borrows_client else aclose_client
        make = partial(connect, config, library=self._library)
        # Not created here, because the client of a cluster connects when it is created.
        self._clients = self.scoped(
            partial(make, timeout=self.timeout, retries=int(self._retry)), close
        )
        self._batch_clients = self._clients
        if self.is_async and config.client is None:
            make()  # checks the config without opening a connection
            # Before a retry, a cluster's client of redis.asyncio closes the connections to all
            # nodes, and cannot open any while the first master in its list is unavailable. Without
            # retries, a batch still reaches the other nodes.
            self._batch_clients = self.scoped(
                partial(make, timeout=self.timeout / 2, retries=0), close
            )

    async def send(
        self,
        *commands: Sequence[Any],
        followup: Sequence[Any] = (),
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """See `ServerTransport`; a copy that redis-py resends has the deadline of the first."""
        if len(commands) == 1:
            replies = await self._send_alone(commands[0], followup)
        else:
            with of_client(self.config):
                replies = await self._send_to_nodes(commands)
        if commands and all(isinstance(reply, NO_REPLY) for reply in replies):
            raise replies[0]
        return replies

    async def _send_alone(self, call: Sequence[Any], followup: Sequence[Any] = ()) -> list[Any]:
        """Sends one call, again if its connection was closed meanwhile; an error is a value."""
        try:
            with suppress(ClosedConnectionError):
                return await self._within_timeout(self._call(_dated(call), followup))
            return await self._within_timeout(self._call(_dated(call), followup))
        except Exception as error:
            return [error]

    async def _within_timeout(self, sent: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        with of_client(self.config):
            replies: list[Any] = await (result_of(sent, self.timeout) if self.is_async else sent)
        return replies

    async def _call(self, call: Sequence[Any], followup: Sequence[Any]) -> list[Any]:
        client = self._clients.get()
        if followup and not self._is_cluster(client):
            with suppress(NoScriptError):
                return await _send_together(client, call, followup)
        try:
            reply = await result_of(client.execute_command(*call))
        except NoScriptError:
            (call,) = with_sources((call,))
            reply = await result_of(client.execute_command(*call))
        if not followup:
            return [reply]
        # WAIT only counts writes of its own connection, so the call is sent again, together with
        # `followup`, on one connection to the record's node. The script replies as the first time.
        try:
            return await _send_together(self._node(_name_in(call)), call, followup)
        except AskError as error:
            # The slot is moving, and the record is already on the new node.
            node = client.get_redis_connection(client.get_node(error.host, error.port))
            return await _send_together(node, ("ASKING",), call, followup)

    async def _send_to_nodes(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Sends each call to its record's node; returns the replies in the order of `calls`."""
        client = self._batch_clients.get()
        if self.is_async and self._is_cluster(client):
            await result_of(client.initialize(), self.timeout)
        by_node: dict[str, list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            by_node[self._node_name(client, _name_in(call))].append(index)
        replies: list[Any] = [None] * len(calls)
        for indexes in by_node.values():
            node_replies = await self._send_batch(client, [calls[index] for index in indexes])
            for index, reply in zip(indexes, node_replies, strict=True):
                replies[index] = reply
        await self._resend(calls, by_node.values(), replies)
        return replies

    async def _send_batch(self, client: Any, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Sends calls to one node in one round trip; returns the replies, with errors as values.

        Raises:
            RedisError, OSError: if there is only one server, and it does not reply.
        """
        try:
            # In redis.asyncio, the client of a node has no pipeline; that of the cluster sends all
            # calls to the one node that has the records.
            node = client if self.is_async else self._node(_name_in(calls[0]))
            pipeline = node.pipeline(transaction=False)
            for call in calls:
                pipeline.execute_command(*_dated(call))
            with of_client(self.config):
                sent = pipeline.execute(raise_on_error=False)
                replies: list[Any] = await result_of(sent, self.timeout)
        except NO_REPLY as error:
            if not self._is_cluster(client):
                raise
            replies = [error] * len(calls)
        return replies

    async def _resend(
        self, calls: Sequence[Sequence[Any]], groups: Iterable[list[int]], replies: list[Any]
    ) -> None:
        """Resends the calls that were not executed, and sets their replies.

        The first call of a group (one node's) is sent alone, because redis-py follows a moving
        slot, and finds the master that replaces a failed one, only for single commands. If it gets
        no reply, the others are not resent. Otherwise they are sent in one batch; those still not
        executed are then sent one by one, until one gets no reply.

        Args:
            groups: the indexes of the calls for each node.
        """
        for group in groups:
            lost = [index for index in group if isinstance(replies[index], _NOT_EXECUTED)]
            if not lost:
                continue
            first, *others = lost
            failed = isinstance(replies[first], NO_REPLY)
            (replies[first],) = await self._send_alone(calls[first])
            if isinstance(replies[first], NO_REPLY):
                continue
            if failed and self._batch_clients is not self._clients:
                await self._batch_clients.aclose()  # so that a new one finds the new master
            if others:
                client = self._batch_clients.get()
                with suppress(*NO_REPLY):
                    again = await self._send_batch(client, [calls[index] for index in others])
                    for index, reply in zip(others, again, strict=True):
                        replies[index] = reply
            for index in others:
                if isinstance(replies[index], _NOT_EXECUTED):
                    (replies[index],) = await self._send_alone(calls[index])
                    if isinstance(replies[index], NO_REPLY):
                        break

    async def ping(self, node: str = "") -> None:
        """See `ServerTransport`; a node that the cluster no longer has passes the check.

        The breaker then closes, and the next command makes the client search for the new node.
        """
        with of_client(self.config):
            client, target = self._clients.get(), {}
            if node:
                if self.is_async:
                    await result_of(client.initialize(), self.timeout)
                if (found := client.get_node(node_name=node)) is None:
                    return
                target = {"target_nodes": found}
            await result_of(client.ping(**target), self.timeout)

    def node_of(self, name: str) -> str:
        """See `BaseTransport`; does not connect."""
        client = self._clients.peek()
        return "" if client is None else self._node_name(client, name)

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


def _name_in(call: Sequence[Any]) -> str:
    """Returns the first name in the call of a script, or in another command."""
    return str(call[3] if call[0] in ("EVALSHA", "EVAL") else call[1])


def _dated(call: Sequence[Any]) -> list[Any]:
    """Returns `call` with its deadline as text; called when a copy is about to be sent."""
    return [str(each) if type(each) is Deadline else each for each in call]


async def _send_together(node: Any, *commands: Sequence[Any]) -> list[Any]:
    """Sends `commands` on one connection; returns the replies to the last two."""
    pipeline = node.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await result_of(pipeline.execute())
    return replies[-2:]
