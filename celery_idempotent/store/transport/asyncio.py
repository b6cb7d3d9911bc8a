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
from celery_idempotent.store.transport.connection import Kind, sentinels_of
from celery_idempotent.store.transport.sync import Call

ASYNC = Kind(
    "redis.asyncio", redis.asyncio.Redis, redis.asyncio.RedisCluster, ClusterNode, Sentinel, Retry
)

#: What redis-py up to 8.1 lets out where a connection is closed under a call: errors of Python's
#: own, which say nothing of a connection (redis-py#4287).
HUNG_UP = (AttributeError, TypeError)

T = TypeVar("T")
P = ParamSpec("P")


def hung_up_is_a_fault(ask: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Sends again what was sent on a connection that was closed at that moment.

    Every script answers a resend as it did the first time.
    """

    @wraps(ask)
    async def ask_again(*args: P.args, **kwargs: P.kwargs) -> T:
        with suppress(*HUNG_UP):
            return await ask(*args, **kwargs)
        try:
            return await ask(*args, **kwargs)
        except HUNG_UP as error:
            raise RedisConnectionError(f"the connection was closed meanwhile: {error}") from error

    return ask_again


class AsyncLine:
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

    @hung_up_is_a_fault
    async def call(self, call: Call, *, then: Sequence[Any] = ()) -> list[Any]:
        """The answer to `call`, and to the command `then` behind it on the same connection.

        Raises:
            RedisError, OSError: if the server answers with an error, or not at all.
        """
        if then:
            return await self._call_then(call, then)
        script, name, arguments = call
        try:
            return [await self.client.evalsha(script.sha, 1, name, *arguments)]
        except NoScriptError:
            return [await self.client.eval(script.source, 1, name, *arguments)]

    @hung_up_is_a_fault
    async def call_all(self, calls: Sequence[Call]) -> list[Any]:
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

    async def _send(self, calls: Sequence[Call], then: Sequence[Any] = ()) -> list[Any]:
        pipeline = self._pipeline()
        for script, name, arguments in calls:
            # Not its method of that name, which a cluster's refuses.
            pipeline.execute_command("EVALSHA", script.sha, 1, name, *arguments)
        if then:
            pipeline.execute_command(*then)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    def _pipeline(self) -> Any:
        client = self.client
        cluster = isinstance(client, ASYNC.cluster)
        return client.pipeline() if cluster else client.pipeline(transaction=False)

    async def _call_then(self, call: Call, then: Sequence[Any]) -> list[Any]:
        answers = await self._send([call], then)
        if isinstance(answers[0], NoScriptError):
            await self.client.script_load(call.script.source)
            answers = await self._send([call], then)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def server_of(self, name: str) -> Any:
        """As `Line.server_of`; of a cluster its node, which is a pool of its own."""
        client = self.client
        if isinstance(client, ASYNC.cluster):
            return client.get_node_from_key(name)
        return client.connection_pool

    @hung_up_is_a_fault
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
