"""A line by way of redis.asyncio, for whichever event loop asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from celery_idempotent.store.per_loop import PerLoop
from celery_idempotent.store.transport.connection import ClientClasses, sentinels_of
from celery_idempotent.store.transport.sync import ScriptCall

ASYNCIO = ClientClasses(
    "redis.asyncio", redis.asyncio.Redis, redis.asyncio.RedisCluster, ClusterNode, Sentinel, Retry
)

#: What redis-py up to 8.1 lets out where a connection is closed under a call: errors of Python's
#: own, which say nothing of a connection (redis-py#4287).
CLOSED_CONNECTION_ERRORS = (AttributeError, TypeError)

T = TypeVar("T")
P = ParamSpec("P")


def retries_closed_connection(ask: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Sends again what was sent on a connection that was closed at that moment.

    Every script answers a resend as it did the first time.
    """

    @wraps(ask)
    async def ask_again(*args: P.args, **kwargs: P.kwargs) -> T:
        with suppress(*CLOSED_CONNECTION_ERRORS):
            return await ask(*args, **kwargs)
        try:
            return await ask(*args, **kwargs)
        except CLOSED_CONNECTION_ERRORS as error:
            raise RedisConnectionError(f"the connection was closed meanwhile: {error}") from error

    return ask_again


class AsyncioTransport:
    """As `ClientLine`; connections belong to an event loop, so each loop has a client.

    Args:
        make: gives a client, which connects when it is first used.
        borrowed: the client is the user's to close.
    """

    def __init__(self, make: Callable[[], Any], *, borrowed: bool = False) -> None:
        self._clients: PerLoop[Any] = PerLoop(make, None if borrowed else _hang_up)

    @property
    def client(self) -> Any:
        """The client of the running event loop."""
        return self._clients.get()

    @retries_closed_connection
    async def call(self, call: ScriptCall, *, followup: Sequence[Any] = ()) -> list[Any]:
        """The answer to `call`, and to the command `then` behind it on the same connection.

        Raises:
            RedisError, OSError: if the server answers with an error, or not at all.
        """
        if followup:
            return await self._call_then(call, followup)
        script, name, arguments = call
        try:
            return [await self.client.evalsha(script.sha, 1, name, *arguments)]
        except NoScriptError:
            return [await self.client.eval(script.source, 1, name, *arguments)]

    @retries_closed_connection
    async def call_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """The answer to each of `calls`, or the error that is its answer.

        One round trip; on a cluster one for each node that has one of the records, all at once.

        Raises:
            RedisError, OSError: if the server does not answer.
        """
        answers = await self._send(calls)
        unknown = [n for n, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            for source in {calls[n].script.source for n in unknown}:
                await self.client.script_load(source)
            for n, answer in zip(
                unknown, await self._send([calls[n] for n in unknown]), strict=True
            ):
                answers[n] = answer
        return answers

    async def _send(self, calls: Sequence[ScriptCall], followup: Sequence[Any] = ()) -> list[Any]:
        pipeline = self._pipeline()
        for script, name, arguments in calls:
            # Not its method of that name, which a cluster's refuses.
            pipeline.execute_command("EVALSHA", script.sha, 1, name, *arguments)
        if followup:
            pipeline.execute_command(*followup)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _pipeline(self) -> Any:
        client = self.client
        cluster = isinstance(client, ASYNCIO.cluster)
        return client.pipeline() if cluster else client.pipeline(transaction=False)

    async def _call_then(self, call: ScriptCall, followup: Sequence[Any]) -> list[Any]:
        answers = await self._send([call], followup)
        if isinstance(answers[0], NoScriptError):
            await self.client.script_load(call.script.source)
            answers = await self._send([call], followup)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def pool_for(self, name: str) -> Any:
        """As `Line.server_of`; of a cluster its node, which is a pool of its own."""
        client = self.client
        if isinstance(client, ASYNCIO.cluster):
            return client.get_node_from_key(name)
        return client.connection_pool

    @retries_closed_connection
    async def ping(self) -> None:
        """Make sure that the server answers; raise what it, or the way to it, did wrong."""
        await self.client.ping()

    async def aclose(self) -> None:
        """Hang up in the running event loop; the next command connects again."""
        await self._clients.aclose()


async def _hang_up(client: Any) -> None:
    for each in (client, *sentinels_of(client)):
        close = getattr(each, "aclose", each.close)  # redis-py 5.0.1 renamed it
        await close()
