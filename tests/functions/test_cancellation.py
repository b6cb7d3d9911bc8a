"""A call that is cancelled, wherever it is and however often, ends and gives its key back."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import anyio
import pytest

from celery_idempotent import Idempotency, State
from celery_idempotent.key.key import Key
from celery_idempotent.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.store import scripts
from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.waiting import POLL_INTERVAL, SOON

#: Seconds that a reply of the store takes: more than any number of turns of the loop.
DELAY = 0.3
#: Turns of the loop in which a call ends that is cancelled at each of them.
TURNS = 20
FOREVER = 3600.0


async def eventually(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SOON
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not: {what}"
        await asyncio.sleep(POLL_INTERVAL)
    return value


# Ways to be cancelled: each runs `call`, and cancels it when `due` is there.

Call = Callable[[], Coroutine[Any, Any, Any]]


async def cancelled_once(call: Call, due: Awaitable[Any]) -> None:
    task = asyncio.create_task(call())
    await due
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_at_each_turn(call: Call, due: Awaitable[Any]) -> None:
    task = asyncio.create_task(call())
    await due
    for _ in range(TURNS):
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def by_anyio(call: Call, due: Awaitable[Any]) -> None:
    async def move_on() -> None:
        await due
        scope.deadline = anyio.current_time()
        asyncio.get_running_loop().call_soon(turn)

    def turn() -> None:
        if not ended:
            turns.append(None)
            assert len(turns) < 10 * TURNS
            asyncio.get_running_loop().call_soon(turn)

    ended: list[None] = []
    turns: list[None] = []
    timer = asyncio.create_task(move_on())
    with anyio.move_on_after(FOREVER) as scope:
        await call()
    ended.append(None)
    await timer
    assert scope.cancelled_caught
    assert len(turns) <= TURNS


async def by_a_task_group(call: Call, due: Awaitable[Any]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await due
        group.cancel_scope.cancel()


async def by_a_timeout(call: Call, due: Awaitable[Any]) -> None:
    async def move_on() -> None:
        await due
        timeout.reschedule(0)

    timer = asyncio.create_task(move_on())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(FOREVER) as timeout:
            await call()
    await timer
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


WAYS = [
    cancelled_once,
    cancelled_at_each_turn,
    by_anyio,
    by_a_task_group,
    pytest.param(
        by_a_timeout,
        marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is new there"),
    ),
]


# Moments to be cancelled at.


class Moment(NamedTuple):
    call: Call
    due: Awaitable[Any]
    #: Whose record is to be free, or completed, in the end.
    keys: list[Key]


class RecordHarness:
    """An engine whose way to the store can be slowed down."""

    def __init__(self, server: RedisServer, proxy: Proxy, key: str) -> None:
        self.server = server
        self.proxy = proxy
        self.key = key
        # No lease ends before the test: a key that is free has been given back.
        self.idem = Idempotency(proxy.url, key_prefix=key, lease=300, wait_timeout=300)
        self.looks = Idempotency(server.url, key_prefix=key)
        self.client = server.client()

    def of(self, order: str) -> Key:
        return self.looks.key_of(order)

    def slow(self, script: str) -> Coroutine[Any, Any, Any]:
        """Have the next reply to `script` come late; to be awaited till it has been sent."""
        sha = scripts.load(script).sha
        known = len(self.proxy.requests_with(sha))
        self.proxy.delay_reply(sha, DELAY)
        return eventually(lambda: len(self.proxy.requests_with(sha)) > known, f"{script} is sent")

    def record(self, key: Key) -> Any:
        return self.looks.executor.store.get(key)

    def connections(self) -> int:
        info: Any = self.client.info("stats")
        return int(info["total_connections_received"])

    def close(self) -> None:
        self.idem.close()
        self.looks.close()
        self.client.close()


@pytest.fixture
def scene(server: RedisServer, key: str) -> Iterator[RecordHarness]:
    with Proxy(server.url) as proxy:
        scene = RecordHarness(server, proxy, key)
        yield scene
        scene.close()


def function(scene: RecordHarness, body: Callable[[], Awaitable[Any]], **options: Any) -> Any:
    @scene.idem.idempotent(key="{order}", name="shop.slow", **options)
    async def charge(order: str) -> Any:
        return await body()

    return charge


async def done() -> str:
    return "done"


def in_the_body(scene: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def body() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    charge = function(scene, body)
    return Moment(lambda: charge("1"), started.wait(), [charge.idempotency_key_of("1")])


def beginning(scene: RecordHarness) -> Moment:
    charge = function(scene, done)
    return Moment(lambda: charge("1"), scene.slow("begin"), [charge.idempotency_key_of("1")])


def waiting(scene: RecordHarness) -> Moment:
    async def call() -> None:
        async with scene.idem.execution("1") as first:
            async with scene.idem.execution("1") as second:
                raise AssertionError(second.decision)
            await first.complete()

    def hears() -> bool:
        clients: Any = scene.client.client_list()
        return any("t" in each["flags"] and each["cmd"] == "getrange" for each in clients)

    return Moment(call, eventually(hears, "it waits"), [scene.of("1")])


def completing(scene: RecordHarness) -> Moment:
    charge = function(scene, done)
    return Moment(lambda: charge("1"), scene.slow("complete"), [charge.idempotency_key_of("1")])


def giving_back(scene: RecordHarness) -> Moment:
    async def body() -> None:
        raise ValueError

    charge = function(scene, body)
    return Moment(lambda: charge("1"), scene.slow("release"), [charge.idempotency_key_of("1")])


def in_a_step(scene: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def step() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    charge = function(scene, lambda: scene.idem.current.step("first", step))  # type: ignore[attr-defined]
    return Moment(lambda: charge("1"), started.wait(), [charge.idempotency_key_of("1")])


def keeping_a_step(scene: RecordHarness) -> Moment:
    charge = function(scene, lambda: scene.idem.current.step("first", done))  # type: ignore[attr-defined]
    return Moment(lambda: charge("1"), scene.slow("save_step"), [charge.idempotency_key_of("1")])


def in_a_block(scene: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def call() -> None:
        async with scene.idem.execution("1"):
            started.set()
            await asyncio.sleep(FOREVER)

    return Moment(call, started.wait(), [scene.of("1")])


def beginning_a_block(scene: RecordHarness) -> Moment:
    async def call() -> None:
        async with scene.idem.execution("1"):
            raise AssertionError("it has been cancelled")

    return Moment(call, scene.slow("begin"), [scene.of("1")])


def completing_a_block(scene: RecordHarness) -> Moment:
    async def call() -> None:
        async with scene.idem.execution("1") as execution:
            await execution.complete("done")

    return Moment(call, scene.slow("complete"), [scene.of("1")])


def keeping_a_step_of_a_block(scene: RecordHarness) -> Moment:
    async def call() -> None:
        async with scene.idem.execution("1") as execution:
            await execution.step("first", done)

    return Moment(call, scene.slow("save_step"), [scene.of("1")])


def in_a_batch(scene: RecordHarness) -> Moment:
    started = asyncio.Event()

    async def call() -> None:
        async with await scene.idem.abegin_many(["1", "2"]):
            started.set()
            await asyncio.sleep(FOREVER)

    return Moment(call, started.wait(), [scene.of("1"), scene.of("2")])


def beginning_a_batch(scene: RecordHarness) -> Moment:
    async def call() -> None:
        await scene.idem.abegin_many(["1", "2"])

    return Moment(call, scene.slow("begin"), [scene.of("1"), scene.of("2")])


def completing_a_batch(scene: RecordHarness) -> Moment:
    async def call() -> None:
        async with await scene.idem.abegin_many(["1", "2"]) as batch:
            await batch.complete_many()

    return Moment(call, scene.slow("complete"), [scene.of("1"), scene.of("2")])


MOMENTS = [
    in_the_body,
    beginning,
    waiting,
    completing,
    giving_back,
    in_a_step,
    keeping_a_step,
    in_a_block,
    beginning_a_block,
    completing_a_block,
    keeping_a_step_of_a_block,
    in_a_batch,
    beginning_a_batch,
    completing_a_batch,
]


async def warm_up(scene: RecordHarness) -> None:
    """Make known every script, and open a connection."""
    async with scene.idem.execution("warm") as execution:
        await execution.step("warm", done)
        await execution.complete()
    async with scene.idem.execution("also warm"):
        pass


def is_over(scene: RecordHarness, moment: Moment) -> bool:
    """Whether each key is free, or completed; one with steps stays, reserved for nobody."""
    records = [scene.record(key) for key in moment.keys]
    return not any(record and record.state is State.STARTED for record in records)


def nothing_is_left(scene: RecordHarness, moment: Moment) -> bool:
    return (
        is_over(scene, moment) and len(asyncio.all_tasks()) == 1 and not asyncio_heartbeat().held()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", MOMENTS)
def test_it_ends_and_gives_the_key_back(
    scene: RecordHarness, at: Any, way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, noise: noises.append(noise))
        await warm_up(scene)
        moment = at(scene)
        before = scene.connections()
        began = time.thread_time()
        await way(moment.call, moment.due)
        if way is cancelled_once:
            assert is_over(scene, moment)
        await eventually(lambda: nothing_is_left(scene, moment), "nothing is left")
        # A waiting call has two connections of its own, and the one that it waits for has another.
        assert scene.connections() - before <= (3 if at is waiting else 1)
        assert time.thread_time() - began < 5
        await scene.idem.aclose()

    noises: list[Any] = []
    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    assert noises == []
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("way", WAYS)
def test_many_cancelled_calls_share_their_connections(scene: RecordHarness, way: Any) -> None:
    async def story() -> None:
        await warm_up(scene)
        before = scene.connections()
        for _ in range(50):
            moment = in_the_body(scene)
            await way(moment.call, moment.due)
        await eventually(lambda: nothing_is_left(scene, moment), "nothing is left")
        assert scene.connections() - before <= 6
        await scene.idem.aclose()

    asyncio.run(story())


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_store_keeps_no_cancelled_call(key: str, way: Any) -> None:
    """It comes back at once, or after a second; the key is free soon after the store answers."""

    async def story(server: RedisServer) -> None:
        idem = Idempotency(server.url, key_prefix=key, lease=300, redis_timeout=60)
        await (await idem.abegin_many(["warm"])).release_many()
        server.pause()
        try:
            began = time.monotonic()
            await way(
                lambda: idem.idempotent(done, name="shop.frozen", key=None)(), asyncio.sleep(0.1)
            )
            assert time.monotonic() - began < 30
        finally:
            server.resume()
        await eventually(lambda: len(asyncio.all_tasks()) == 1, "the call ends")
        assert [*idem.records()] == []
        await idem.aclose()
        idem.close()

    with RedisServer.start(config={}) as server:
        asyncio.run(story(server))


def test_the_end_of_the_loop_waits_for_what_a_cancelled_call_has_left(scene: RecordHarness) -> None:
    moments = []

    async def story() -> None:
        await warm_up(scene)
        moments.append(beginning(scene))
        await by_anyio(moments[0].call, moments[0].due)
        assert len(asyncio.all_tasks()) > 1

    anyio.run(story)
    assert scene.record(moments[0].keys[0]) is None


def test_a_task_that_is_cancelled_with_its_loop_completes(scene: RecordHarness) -> None:
    charges = []

    async def story() -> None:
        await warm_up(scene)
        charge = function(scene, done)
        due = scene.slow("complete")
        charges.append(charge.idempotency_key_of("1"))
        task = asyncio.create_task(charge("1"))
        await due
        assert not task.done()

    asyncio.run(story())
    assert scene.record(charges[0]).result == "done"


def test_steps_of_several_tasks_are_kept_before_the_key_is_given_back(
    scene: RecordHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        await warm_up(scene)
        attempts = []

        async def body() -> None:
            attempts.append(None)
            execution: Any = scene.idem.current
            await asyncio.gather(*(execution.step(f"{n}", count) for n in range(3)))
            if len(attempts) == 1:
                await asyncio.sleep(FOREVER)

        async def count() -> None:
            counts.append(None)

        charge = function(scene, body)
        await cancelled_at_each_turn(lambda: charge("1"), scene.slow("save_step"))
        await eventually(lambda: len(asyncio.all_tasks()) == 1, "nothing is left")
        await charge("1")
        assert counts == [None] * 3
        await scene.idem.aclose()

    counts: list[None] = []
    asyncio.run(story())
    assert "has lost its lease" not in caplog.text
