"""A line by way of a redis-py client: to a Redis Cluster, or by a client of the user's own.

Slower than a `Line`, and all that the client does is done: finding the node, following a slot that
moves, whatever a user's subclass adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis, RedisCluster
from redis.exceptions import AskError, NoScriptError, TryAgainError

from celery_idempotent.store.transport.connection import close_client
from celery_idempotent.store.transport.sync import ScriptCall

#: A node's words for: ask another one.
_ELSEWHERE = (AskError, TryAgainError)  # MovedError is an AskError


class ClientTransport:
    """Calls scripts through a client.

    Args:
        make: gives the client; called once, when the first command is due, since a cluster's
            client connects as it is made.
        borrowed: the client is the user's to close.
    """

    def __init__(self, make: Callable[[], Any], *, borrowed: bool = False) -> None:
        self._make = make
        self._borrowed = borrowed
        self._client: Any = None

    @property
    def client(self) -> Any:
        """The client."""
        if self._client is None:
            self._client = self._make()
        return self._client

    def call(self, call: ScriptCall, *, followup: Sequence[Any] = ()) -> list[Any]:
        """As `Line.call`."""
        if followup:
            return self._call_then(call, followup)
        script, name, arguments = call
        try:
            return [self.client.evalsha(script.sha, 1, name, *arguments)]
        except NoScriptError:
            return [self.client.eval(script.source, 1, name, *arguments)]

    def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """As `Line.call_all`: one round trip for each node that has one of the records."""
        answers: list[Any] = [None] * len(calls)
        by_node: dict[int, list[int]] = defaultdict(list)
        nodes: dict[int, Redis] = {}
        for n, call in enumerate(calls):
            node = self._node(call.name)
            nodes[id(node)] = node
            by_node[id(node)].append(n)
        for node_id, places in by_node.items():
            pipeline = nodes[node_id].pipeline(transaction=False)
            for n in places:
                pipeline.evalsha(calls[n].script.sha, 1, calls[n].name, *calls[n].arguments)
            for n, answer in zip(places, pipeline.execute(raise_on_error=False), strict=True):
                answers[n] = self._by_itself(calls[n]) if _is_no_answer(answer) else answer
        return answers

    def _by_itself(self, call: ScriptCall) -> Any:
        try:
            return self.call(call)[0]
        except Exception as error:
            return error

    def _call_then(self, call: ScriptCall, followup: Sequence[Any]) -> list[Any]:
        # The client finds the node and teaches it the script. Sent again on one connection the call
        # answers as before, and what stands behind it speaks of that connection.
        self.call(call)
        try:
            return _together(self._node(call.name), call, followup)
        except AskError as moving:
            # The record is at its slot's next master already, which answers who asks for it so.
            cluster = self.client
            node = cluster.get_redis_connection(cluster.get_node(moving.host, moving.port))
            return _together(node, call, followup, ahead=["ASKING"])[1:]

    def _node(self, name: str) -> Redis:
        """The client of the server that has the record."""
        client = self.client
        if not isinstance(client, RedisCluster):
            return client  # type: ignore[no-any-return]
        node = client.get_node_from_key(name)  # type: ignore[no-untyped-call]
        connection: Redis = client.get_redis_connection(node)
        return connection

    def pool_for(self, name: str) -> Any:
        """As `Line.server_of`."""
        return self._node(name).connection_pool

    def ping(self) -> None:
        """As `Line.ping`."""
        self.client.ping()

    def close(self) -> None:
        """Hang up; the next command connects again."""
        if self._client is None or self._borrowed:
            return
        client, self._client = self._client, None
        close_client(client)


def _together(
    node: Redis, call: ScriptCall, followup: Sequence[Any], ahead: Sequence[str] = ()
) -> list[Any]:
    """What one server answers to all of them, on one connection."""
    pipeline = node.pipeline(transaction=False)
    for command in ahead:
        pipeline.execute_command(command)  # type: ignore[no-untyped-call]
    pipeline.evalsha(call.script.sha, 1, call.name, *call.arguments)
    pipeline.execute_command(*followup)  # type: ignore[no-untyped-call]
    answers: list[Any] = pipeline.execute()
    return answers


def _is_no_answer(answer: Any) -> bool:
    return isinstance(answer, (NoScriptError, *_ELSEWHERE))
