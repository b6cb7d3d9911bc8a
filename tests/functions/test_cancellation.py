"""Cancelled calls: they end and release their keys, at any moment and however often cancelled."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import anyio
import pytest

from celery_idempotent import Idempotency, Record, State
from celery_idempotent.core.record import layout
from celery_idempotent.core.store import scripts, tracking
from celery_idempotent.functions.asyncio_heartbeat import asyncio_heartbeat
from tests.conftest import exhaustive_except
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually_async

#: Seconds by which the proxy delays a reply: longer than TURNS turns of the event loop.
REPLY_DELAY = 0.3
#: A call that is cancelled at each turn of the event loop ends within this many turns.
TURNS = 20
FOREVER = 3600.0


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
    assert not task.cancelling()


WAYS = exhaustive_except(
    [
        *(cancel_once, cancel_at_each_turn, cancel_by_anyio_timeout, cancel_by_task_group),
        *([cancel_by_asyncio_timeout] if sys.version_info >= (3, 11) else []),
    ],
    *(cancel_once, cancel_at_each_turn),
)


class RecordHarness:
    """An engine whose replies from Redis can be delayed, and another one that reads records."""

    def __init__(self, server: RedisServer, proxy: Proxy, key: str) -> None:
        self.server = server
        self.proxy = proxy
        self.key = key
        # No lease expires during the test: a free key has been released.
        self.idem = Idempotency(proxy.url, key_prefix=key, lease=300, wait_timeout=300)
        self.client = server.client()
        self.warm: set[bytes] = set()

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

    def records(self) -> list[Record]:
        """Returns the records of calls, except those that `warm_up` has left."""
        found = [self.client.get(name) for name in {*self.names()} - self.warm]
        return [layout.read(raw, "", "") for raw in found if isinstance(raw, bytes)]

    def names(self) -> Iterator[bytes]:
        return self.client.scan_iter(f"{self.key}:*")

    def has_waiting_client(self) -> bool:
        clients: Any = self.client.client_list()
        return any("t" in each["flags"] and each["cmd"] == "getrange" for each in clients)

    def connections(self) -> int:
        info: Any = self.client.info("stats")
        return int(info["total_connections_received"])

    def close(self) -> None:
        self.idem.close()
        self.client.close()


def idempotent_function(harness: RecordHarness, body: Body, **options: Any) -> Any:
    @harness.idem.idempotent(key="{order}", name="shop.slow", **options)
    async def charge(order: str) -> Any:
        return await body()

    return charge


# Calls, whose body or block runs `body`.

Body = Callable[[], Coroutine[Any, Any, Any]]


async def done() -> str:
    return "done"


async def fail() -> None:
    raise ValueError


async def call_function(harness: RecordHarness, body: Body) -> None:
    await idempotent_function(harness, body)("1")


async def call_step(harness: RecordHarness, body: Body) -> None:
    await call_function(harness, lambda: harness.idem.current.step("first", body))  # type: ignore[arg-type, return-value]


async def use_block(harness: RecordHarness, body: Body) -> None:
    async with harness.idem.execution("1") as execution:
        await body()
        await execution.complete("done")


async def use_step_of_block(harness: RecordHarness, body: Body) -> None:
    async with harness.idem.execution("1") as execution:
        await execution.step("first", body)


async def use_batch(harness: RecordHarness, body: Body) -> None:
    async with await harness.idem.abegin_many(["1", "2"]) as batch:
        await body()
        await batch.complete_many()


async def wait_for_itself(harness: RecordHarness, body: Body) -> None:
    async with harness.idem.execution("1"), harness.idem.execution("1") as second:
        raise AssertionError(second.decision)


class Moment(NamedTuple):
    """A call, and the event after which it is cancelled."""

    call: Call
    due: Awaitable[Any]


#: The call, and what its body does; or the script whose reply is delayed, and the states after it.
MOMENTS: dict[str, tuple[Callable[[RecordHarness, Body], Any], Body, str, list[State]]] = {
    "beginning": (call_function, done, "begin", []),
    "completing": (call_function, done, "settle", [State.COMPLETED]),
    "releasing": (call_function, fail, "settle", []),
    "storing a step": (call_step, done, "extend", [State.RESERVED]),
    "beginning a block": (use_block, done, "begin", []),
    "completing a block": (use_block, done, "settle", [State.COMPLETED]),
    "storing a step of a block": (use_step_of_block, done, "extend", [State.RESERVED]),
    "beginning a batch": (use_batch, done, "begin", []),
    "completing a batch": (use_batch, done, "settle", [State.COMPLETED] * 2),
    "in the body": (call_function, done, "", []),
    "in a step": (call_step, done, "", []),
    "in a block": (use_block, done, "", []),
    "in a batch": (use_batch, done, "", []),
    "waiting": (wait_for_itself, done, "", []),
}


def moment(harness: RecordHarness, name: str) -> Moment:
    call, body, script, _ = MOMENTS[name]
    if script:
        return Moment(lambda: call(harness, body), harness.delay_reply(script))
    if name == "waiting":
        due = eventually_async(harness.has_waiting_client, "the call waits")
        return Moment(lambda: call(harness, body), due)
    started = asyncio.Event()

    async def wait_forever() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    return Moment(lambda: call(harness, wait_forever), started.wait())


@pytest.fixture
def harness(server: RedisServer, key: str, monkeypatch: Any) -> Iterator[RecordHarness]:
    monkeypatch.setattr(tracking, "IDLE_TIMEOUT", 0.5)  # of the connection of waiting calls
    with Proxy(server.url) as proxy:
        harness = RecordHarness(server, proxy, key)
        yield harness
        harness.close()


async def warm_up(harness: RecordHarness) -> None:
    """Loads every script, and opens a connection."""
    async with harness.idem.execution("warm") as execution:
        await execution.step("warm", done)
        await execution.complete()
    async with harness.idem.execution("also warm"):
        pass
    harness.warm = {*harness.names()}


def is_settled(harness: RecordHarness) -> bool:
    return not any(record.state is State.STARTED for record in harness.records())


def is_cleaned_up(harness: RecordHarness) -> bool:
    return is_settled(harness) and len(asyncio.all_tasks()) < 2 and not asyncio_heartbeat().leases()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", MOMENTS)
def test_a_cancelled_call_ends_and_releases_its_key(
    harness: RecordHarness, at: str, way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    script, states = MOMENTS[at][2:]

    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: loop_errors.append(error))
        await warm_up(harness)
        before = harness.connections()
        started_at = time.thread_time()
        await way(*moment(harness, at))
        if way is cancel_once:
            assert is_settled(harness)
        await eventually_async(lambda: is_cleaned_up(harness), "the call is cleaned up")
        if script:
            assert [record.state for record in harness.records()] == states
        # A waiting call has two connections, and the call that it waits for has a third.
        assert harness.connections() - before <= (3 if at == "waiting" else 1)
        assert time.thread_time() - started_at < 5
        await harness.idem.aclose()

    loop_errors: list[Any] = []
    with caplog.at_level(logging.INFO):
        asyncio.run(cancel())
    assert loop_errors == []
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []
    assert "ran; its key is free" not in caplog.text, "it was cancelled"


@pytest.mark.parametrize("way", WAYS)
def test_many_cancelled_calls_share_their_connections(harness: RecordHarness, way: Any) -> None:
    async def cancel() -> None:
        await warm_up(harness)
        before = harness.connections()
        for _ in range(50):
            await way(*moment(harness, "in the body"))
        await eventually_async(lambda: is_cleaned_up(harness), "the call is cleaned up")
        assert harness.connections() - before <= 6
        await harness.idem.aclose()

    asyncio.run(cancel())


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_call_does_not_wait_for_a_frozen_store(key: str, way: Any) -> None:
    """The call ends within a second; its key is released once the store replies."""

    async def cancel(server: RedisServer) -> None:
        idem = Idempotency(server.url, key_prefix=key, lease=300, redis_timeout=60)
        await (await idem.abegin_many(["warm"])).release_many()
        server.pause()
        try:
            started_at = time.monotonic()
            await way(lambda: idem.idempotent(done, name="frozen", key=None)(), asyncio.sleep(0.1))
            assert time.monotonic() - started_at < 30
        finally:
            server.resume()
        await eventually_async(lambda: len(asyncio.all_tasks()) == 1, "the call ends")
        assert [*idem.records()] == []
        await idem.aclose()
        idem.close()

    with RedisServer.start(config={}) as server:
        asyncio.run(cancel(server))


def test_the_end_of_the_loop_waits_for_a_cancelled_call(harness: RecordHarness) -> None:
    async def cancel() -> None:
        await warm_up(harness)
        await cancel_by_anyio_timeout(*moment(harness, "beginning"))
        assert len(asyncio.all_tasks()) > 1

    anyio.run(cancel)
    assert harness.records() == []


def test_a_call_that_is_cancelled_with_its_loop_is_completed(harness: RecordHarness) -> None:
    async def cancel() -> None:
        await warm_up(harness)
        call, due = moment(harness, "completing")
        task = asyncio.create_task(call())
        await due
        assert not task.done()

    asyncio.run(cancel())
    assert [record.body for record in harness.records()] == [b'"done"']


def test_steps_of_several_tasks_are_stored_before_the_key_is_released(
    harness: RecordHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel() -> None:
        await warm_up(harness)
        attempts = []

        async def body() -> None:
            attempts.append(None)
            execution: Any = harness.idem.current
            await asyncio.gather(*(execution.step(f"{n}", count) for n in range(3)))
            if len(attempts) == 1:
                await asyncio.sleep(FOREVER)

        async def count() -> None:
            counts.append(None)

        charge = idempotent_function(harness, body)
        await cancel_at_each_turn(lambda: charge("1"), harness.delay_reply("extend"))
        await eventually_async(lambda: len(asyncio.all_tasks()) == 1, "the call is cleaned up")
        await charge("1")
        assert counts == [None] * 3
        await harness.idem.aclose()

    counts: list[None] = []
    asyncio.run(cancel())
    assert "has lost its lease" not in caplog.text
