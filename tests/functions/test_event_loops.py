"""Whatever becomes of an event loop, what the engine has opened in it is closed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from asgiref.sync import async_to_sync

from celery_idempotent import Decision, Idempotency
from celery_idempotent.lease.asyncio_heartbeat import AsyncioHeartbeat
from celery_idempotent.store import per_loop
from celery_idempotent.testing.server import RedisServer
from tests.waiting import POLL_INTERVAL, SOON, eventually

LOOPS = 300

Charge = Callable[[int], Any]


@pytest.fixture
def charge(idem: Idempotency) -> Any:
    @idem.idempotent(key="{n}", name="loops.charge")
    async def charge(n: int) -> int:
        return n

    return charge


def by_asyncio(charge: Charge, n: int) -> None:
    asyncio.run(charge(n))


def by_anyio(charge: Charge, n: int) -> None:
    anyio.run(charge, n)


def by_asgiref(charge: Charge, n: int) -> None:
    async_to_sync(charge)(n)


def by_hand(charge: Charge, n: int) -> None:
    """A loop that is closed, and nothing else."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(charge(n))
    finally:
        loop.close()


def dropped(charge: Charge, n: int) -> None:
    """A loop that is not even closed."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(charge(n))


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def connected(client: redis.Redis) -> int:
    clients: Any = client.client_list()
    return len(clients)


@pytest.fixture
def bounded(client: redis.Redis) -> Iterator[Callable[[int], None]]:
    """Compares what is open, without calling the garbage collector, with what was before."""

    def check(more: int) -> None:
        assert descriptors() - files <= more
        eventually(lambda: connected(client) - clients <= more, "the server's clients are gone")

    connected(client)
    gc.collect()
    files, clients = descriptors(), connected(client)
    yield check
    gc.collect()
    assert sum(type(each) is AsyncioHeartbeat for each in gc.get_objects()) <= 3


@pytest.mark.parametrize("run", [by_asyncio, by_anyio, by_asgiref])
def test_one_that_is_shut_down_leaves_nothing(
    charge: Charge, bounded: Callable[[int], None], run: Callable[[Charge, int], None]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(LOOPS):
            run(charge, n)
    bounded(0)


# On a busy machine a beat may be under way when the loop is closed: Python then complains of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_only_closed_leaves_little(
    charge: Charge, bounded: Callable[[int], None]
) -> None:
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for n in range(LOOPS):
                by_hand(charge, n)
                if n % 50 == 49:
                    bounded(per_loop.MOST_CLOSED + 1)
            gc.collect()
    finally:
        gc.enable()


# On a busy machine a beat may be under way when the loop is closed: Python then complains of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_dropped_is_garbage(charge: Charge, bounded: Callable[[int], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for n in range(10):
            dropped(charge, n)
        gc.collect()
    bounded(0)


def test_many_threads_have_loops_of_their_own(
    charge: Charge, idem: Idempotency, bounded: Callable[[int], None]
) -> None:
    with ThreadPoolExecutor(20) as pool:
        together = threading.Barrier(20)

        def run(n: int) -> None:
            together.wait()
            asyncio.run(charge(n))

        for _ in range(5):
            list(pool.map(run, range(20)))
    idem.close()
    bounded(0)


def test_waiting_calls_leave_nothing(idem: Idempotency, bounded: Callable[[int], None]) -> None:
    async def story(n: int) -> None:
        async with idem.execution(n) as first:
            waits = asyncio.create_task(second(n))
            await asyncio.sleep(0.01)
            await first.complete("done")
            assert await waits == "done"

    async def second(n: int) -> Any:
        async with idem.execution(n) as execution:
            assert execution.decision is Decision.REPLAY
            return execution.replay

    for n in range(30):
        asyncio.run(story(n))
    bounded(0)


def test_an_engine_that_is_dropped_leaves_nothing_in_a_loop_that_goes_on(
    server: RedisServer, key: str, bounded: Callable[[int], None]
) -> None:
    async def story() -> None:
        for n in range(20):
            engine = Idempotency(server.url, key_prefix=key)
            async with engine.execution(n) as execution:
                await execution.complete()
            del engine, execution
        gc.collect()
        deadline = time.monotonic() + SOON
        while descriptors() > files + 3:
            assert time.monotonic() < deadline, "connections are open"
            await asyncio.sleep(POLL_INTERVAL)

    files = descriptors()

    asyncio.run(story())
    bounded(0)


def test_aclose_is_for_the_running_loop(
    idem: Idempotency, charge: Charge, bounded: Callable[[int], None]
) -> None:
    async def story() -> None:
        await idem.aclose()
        await charge(1)
        await idem.aclose()
        bounded(3)  # the loop's own
        await charge(2)
        await idem.aclose()
        await idem.aclose()

    for _ in range(3):
        asyncio.run(story())
    bounded(0)


def test_a_client_that_is_the_users_stays_open(
    server: RedisServer, key: str, client: redis.Redis
) -> None:
    async def story() -> None:
        idem = Idempotency(own, key_prefix=key)
        async with idem.execution("1") as execution:
            await execution.complete()
        await idem.aclose()
        assert own.connection_pool is pool
        assert connected(client) > before

    before = connected(client)
    own = redis.asyncio.Redis.from_url(server.url)
    pool = own.connection_pool

    async def closing() -> None:
        await story()
        await own.aclose()

    asyncio.run(closing())
