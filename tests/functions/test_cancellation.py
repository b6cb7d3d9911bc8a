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

from celery_idempotent import Idempotency, State
from celery_idempotent.core.key import Key
from celery_idempotent.core.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.core.store import run_sync, scripts
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually_async

Run = Callable[[Coroutine[Any, Any, Any]], Any]


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


def during(
    harness: RecordHarness, script: str, body: Callable[[], Awaitable[Any]] = done
) -> Moment:
    charge = idempotent_function(harness, body)
    key = charge.idempotency_key_of("1")
    return Moment(lambda: charge("1"), harness.delay_reply(script), [key])


def beginning(harness: RecordHarness) -> Moment:
    return during(harness, "begin")


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
    return during(harness, "settle")


def releasing(harness: RecordHarness) -> Moment:
    async def body() -> None:
        raise ValueError

    return during(harness, "settle", body)


def in_a_step(harness: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def step() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    charge = idempotent_function(harness, lambda: harness.idem.current.step("first", step))  # type: ignore[attr-defined]
    return Moment(lambda: charge("1"), started.wait(), [charge.idempotency_key_of("1")])


def storing_a_step(harness: RecordHarness) -> Moment:
    return during(harness, "extend", lambda: harness.idem.current.step("first", done))  # type: ignore[attr-defined]


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

    return Moment(call, harness.delay_reply("settle"), [harness.key_of("1")])


def storing_a_step_of_a_block(harness: RecordHarness) -> Moment:
    async def call() -> None:
        async with harness.idem.execution("1") as execution:
            await execution.step("first", done)

    return Moment(call, harness.delay_reply("extend"), [harness.key_of("1")])


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

    return Moment(call, harness.delay_reply("settle"), [harness.key_of("1"), harness.key_of("2")])


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


@pytest.fixture
def harness(server: RedisServer, key: str) -> Iterator[RecordHarness]:
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


def is_settled(harness: RecordHarness, moment: Moment) -> bool:
    """Returns whether no key is STARTED; a released key with steps keeps a record."""
    records = [harness.record(key) for key in moment.keys]
    return not any(record and record.state is State.STARTED for record in records)


def is_cleaned_up(harness: RecordHarness, moment: Moment) -> bool:
    return (
        is_settled(harness, moment)
        and len(asyncio.all_tasks()) == 1
        and not asyncio_heartbeat().held()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", MOMENTS)
def test_a_cancelled_call_ends_and_releases_its_key(
    harness: RecordHarness, at: Any, way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: loop_errors.append(error))
        await warm_up(harness)
        moment = at(harness)
        before = harness.connections()
        started_at = time.thread_time()
        await way(moment.call, moment.due)
        if way is cancel_once:
            assert is_settled(harness, moment)
        await eventually_async(lambda: is_cleaned_up(harness, moment), "the call is cleaned up")
        # A waiting call has two connections, and the call that it waits for has a third.
        assert harness.connections() - before <= (3 if at is waiting else 1)
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
            moment = in_the_body(harness)
            await way(moment.call, moment.due)
        await eventually_async(lambda: is_cleaned_up(harness, moment), "the call is cleaned up")
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
            await way(
                lambda: idem.idempotent(done, name="shop.frozen", key=None)(), asyncio.sleep(0.1)
            )
            assert time.monotonic() - started_at < 30
        finally:
            server.resume()
        await eventually_async(lambda: len(asyncio.all_tasks()) == 1, "the call ends")
        assert [*idem.records()] == []
        await idem.aclose()
        idem.close()

    with RedisServer.start(config={}) as server:
        asyncio.run(cancel(server))


def test_the_end_of_the_loop_waits_for_the_release_by_a_cancelled_call(
    harness: RecordHarness,
) -> None:
    moments = []

    async def cancel() -> None:
        await warm_up(harness)
        moments.append(beginning(harness))
        await cancel_by_anyio_timeout(moments[0].call, moments[0].due)
        assert len(asyncio.all_tasks()) > 1

    anyio.run(cancel)
    assert harness.record(moments[0].keys[0]) is None


def test_a_call_that_is_cancelled_with_its_loop_is_completed(harness: RecordHarness) -> None:
    keys = []

    async def cancel() -> None:
        await warm_up(harness)
        charge = idempotent_function(harness, done)
        due = harness.delay_reply("settle")
        keys.append(charge.idempotency_key_of("1"))
        task = asyncio.create_task(charge("1"))
        await due
        assert not task.done()

    asyncio.run(cancel())
    assert harness.record(keys[0]).result == "done"


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


class TestFunctions:
    @pytest.mark.parametrize("moment", ["begin", "settle"])
    def test_a_call_that_is_cancelled_during_a_reply_is_settled(
        self, idem: Idempotency, run: Run, key: str, moment: str
    ) -> None:
        runs = []

        @idem.idempotent(key="{order}", name="shop.slow")
        async def charge(order: str) -> str:
            runs.append(order)
            return "charged"

        async def cancel() -> None:
            await charge("warm " + key)
            runs.clear()
            store = idem.async_executor.store
            send, commands = store._transport.send, []

            async def cancel_before_return(command: Any, **followup: Any) -> Any:
                reply = await send(command, **followup)
                if command[1] == scripts.load(moment).sha:
                    commands.append(command)
                    task.cancel()
                    await asyncio.sleep(0)
                return reply

            store._transport.send = cancel_before_return  # type: ignore[method-assign]
            task = asyncio.create_task(charge(key))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(commands) == 1  # the command was neither aborted nor repeated

        run(cancel())
        record = run_sync(idem.executor.store.get(charge.idempotency_key_of(key)))
        if moment == "begin":
            assert (runs, record) == ([], None)
        else:
            assert (runs, record.result) == ([key], "charged")
