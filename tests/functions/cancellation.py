"""Ways to cancel a call, and moments of a call at which it is cancelled."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import anyio
import pytest

from celery_idempotent import Idempotency
from celery_idempotent.key.key import Key
from celery_idempotent.store import scripts
from celery_idempotent.store.run_sync import run_sync
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.waiting import POLL_INTERVAL, SOON

#: Seconds by which the proxy delays a reply: longer than TURNS turns of the event loop.
REPLY_DELAY = 0.3
#: A call that is cancelled at each turn of the event loop ends within this many turns.
TURNS = 20
FOREVER = 3600.0


async def eventually_async(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SOON
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(POLL_INTERVAL)
    return value


# Ways: each runs `call` and cancels it once `due` has completed.

Call = Callable[[], Coroutine[Any, Any, Any]]


async def cancel_once(call: Call, due: Awaitable[Any]) -> None:
    task = asyncio.create_task(call())
    await due
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_at_each_turn(call: Call, due: Awaitable[Any]) -> None:
    task = asyncio.create_task(call())
    await due
    for _ in range(TURNS):
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def cancel_by_anyio_timeout(call: Call, due: Awaitable[Any]) -> None:
    async def expire() -> None:
        await due
        scope.deadline = anyio.current_time()
        asyncio.get_running_loop().call_soon(count_turn)

    def count_turn() -> None:
        if not ended:
            turns.append(None)
            assert len(turns) < 10 * TURNS
            asyncio.get_running_loop().call_soon(count_turn)

    ended: list[None] = []
    turns: list[None] = []
    timer = asyncio.create_task(expire())
    with anyio.move_on_after(FOREVER) as scope:
        await call()
    ended.append(None)
    await timer
    assert scope.cancelled_caught
    assert len(turns) <= TURNS


async def cancel_by_task_group(call: Call, due: Awaitable[Any]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await due
        group.cancel_scope.cancel()


async def cancel_by_asyncio_timeout(call: Call, due: Awaitable[Any]) -> None:
    async def expire() -> None:
        await due
        timeout.reschedule(0)

    timer = asyncio.create_task(expire())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(FOREVER) as timeout:
            await call()
    await timer
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


WAYS = [
    cancel_once,
    cancel_at_each_turn,
    pytest.param(cancel_by_anyio_timeout, marks=pytest.mark.exhaustive),
    pytest.param(cancel_by_task_group, marks=pytest.mark.exhaustive),
    pytest.param(
        cancel_by_asyncio_timeout,
        marks=[
            pytest.mark.exhaustive,
            pytest.mark.skipif(
                sys.version_info < (3, 11), reason="asyncio.timeout requires Python 3.11"
            ),
        ],
    ),
]


# Moments.


class Moment(NamedTuple):
    """A call, and the event after which it is cancelled."""

    call: Call
    due: Awaitable[Any]
    #: The keys that must be released, or completed, in the end.
    keys: list[Key]


class RecordHarness:
    """An engine whose replies from Redis can be delayed, and another one that reads records."""

    def __init__(self, server: RedisServer, proxy: Proxy, key: str) -> None:
        self.server = server
        self.proxy = proxy
        self.key = key
        # No lease expires during the test: a free key has been released.
        self.idem = Idempotency(proxy.url, key_prefix=key, lease=300, wait_timeout=300)
        self.observer = Idempotency(server.url, key_prefix=key)
        self.client = server.client()

    def key_of(self, order: str) -> Key:
        return self.observer.key_of(order)

    def delay_reply(self, script: str) -> Coroutine[Any, Any, Any]:
        """Delays the next reply to `script`; the returned coroutine waits for the request.

        The delay begins when that coroutine ends, so the call is always cancelled before the reply.
        """
        sha = scripts.load(script).sha
        sent_before = len(self.proxy.requests_with(sha))
        seen = threading.Event()
        self.proxy.delay_reply(sha, REPLY_DELAY, after=seen)

        async def wait() -> None:
            await eventually_async(
                lambda: len(self.proxy.requests_with(sha)) > sent_before, f"{script} is sent"
            )
            seen.set()

        return wait()

    def record(self, key: Key) -> Any:
        return run_sync(self.observer.executor.store.get(key))

    def connections(self) -> int:
        info: Any = self.client.info("stats")
        return int(info["total_connections_received"])

    def close(self) -> None:
        self.idem.close()
        self.observer.close()
        self.client.close()


def idempotent_function(
    harness: RecordHarness, body: Callable[[], Awaitable[Any]], **options: Any
) -> Any:
    @harness.idem.idempotent(key="{order}", name="shop.slow", **options)
    async def charge(order: str) -> Any:
        return await body()

    return charge


async def done() -> str:
    return "done"


def in_the_body(harness: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def body() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    charge = idempotent_function(harness, body)
    return Moment(lambda: charge("1"), started.wait(), [charge.idempotency_key_of("1")])


def beginning(harness: RecordHarness) -> Moment:
    charge = idempotent_function(harness, done)
    return Moment(
        lambda: charge("1"), harness.delay_reply("begin"), [charge.idempotency_key_of("1")]
    )


def waiting(harness: RecordHarness) -> Moment:
    async def call() -> None:
        async with harness.idem.execution("1") as first:
            async with harness.idem.execution("1") as second:
                raise AssertionError(second.decision)
            await first.complete()

    def is_waiting() -> bool:
        clients: Any = harness.client.client_list()
        return any("t" in each["flags"] and each["cmd"] == "getrange" for each in clients)

    return Moment(call, eventually_async(is_waiting, "the call waits"), [harness.key_of("1")])


def completing(harness: RecordHarness) -> Moment:
    charge = idempotent_function(harness, done)
    return Moment(
        lambda: charge("1"), harness.delay_reply("complete"), [charge.idempotency_key_of("1")]
    )


def releasing(harness: RecordHarness) -> Moment:
    async def body() -> None:
        raise ValueError

    charge = idempotent_function(harness, body)
    return Moment(
        lambda: charge("1"), harness.delay_reply("release"), [charge.idempotency_key_of("1")]
    )


def in_a_step(harness: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def step() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    charge = idempotent_function(harness, lambda: harness.idem.current.step("first", step))  # type: ignore[attr-defined]
    return Moment(lambda: charge("1"), started.wait(), [charge.idempotency_key_of("1")])


def storing_a_step(harness: RecordHarness) -> Moment:
    charge = idempotent_function(harness, lambda: harness.idem.current.step("first", done))  # type: ignore[attr-defined]
    return Moment(
        lambda: charge("1"), harness.delay_reply("save_step"), [charge.idempotency_key_of("1")]
    )


def in_a_block(harness: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def call() -> None:
        async with harness.idem.execution("1"):
            started.set()
            await asyncio.sleep(FOREVER)

    return Moment(call, started.wait(), [harness.key_of("1")])


def beginning_a_block(harness: RecordHarness) -> Moment:
    async def call() -> None:
        async with harness.idem.execution("1"):
            raise AssertionError("the block runs though it was cancelled")

    return Moment(call, harness.delay_reply("begin"), [harness.key_of("1")])


def completing_a_block(harness: RecordHarness) -> Moment:
    async def call() -> None:
        async with harness.idem.execution("1") as execution:
            await execution.complete("done")

    return Moment(call, harness.delay_reply("complete"), [harness.key_of("1")])


def storing_a_step_of_a_block(harness: RecordHarness) -> Moment:
    async def call() -> None:
        async with harness.idem.execution("1") as execution:
            await execution.step("first", done)

    return Moment(call, harness.delay_reply("save_step"), [harness.key_of("1")])


def in_a_batch(harness: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def call() -> None:
        async with await harness.idem.abegin_many(["1", "2"]):
            started.set()
            await asyncio.sleep(FOREVER)

    return Moment(call, started.wait(), [harness.key_of("1"), harness.key_of("2")])


def beginning_a_batch(harness: RecordHarness) -> Moment:
    async def call() -> None:
        await harness.idem.abegin_many(["1", "2"])

    return Moment(call, harness.delay_reply("begin"), [harness.key_of("1"), harness.key_of("2")])


def completing_a_batch(harness: RecordHarness) -> Moment:
    async def call() -> None:
        async with await harness.idem.abegin_many(["1", "2"]) as batch:
            await batch.complete_many()

    return Moment(call, harness.delay_reply("complete"), [harness.key_of("1"), harness.key_of("2")])


MOMENTS = [
    in_the_body,
    beginning,
    waiting,
    completing,
    releasing,
    in_a_step,
    storing_a_step,
    in_a_block,
    beginning_a_block,
    completing_a_block,
    storing_a_step_of_a_block,
    in_a_batch,
    beginning_a_batch,
    completing_a_batch,
]
