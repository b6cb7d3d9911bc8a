"""Event loops that end, are closed or are dropped: the engine leaves no connections open."""

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
from celery_idempotent.core.store.transport import per_loop
from celery_idempotent.functions.asyncio_heartbeat import TimerRenewer
from tests.conftest import exhaustive_except
from tests.servers.redis_server import RedisServer
from tests.waiting import POLL_INTERVAL, SOON, eventually

LOOPS = 300

Charge = Callable[[int], Any]
Bounded = Callable[[int], None]


@pytest.fixture
def charge(idem: Idempotency) -> Any:
    @idem.idempotent(key="{n}", name="loops.charge")
    async def charge(n: int) -> int:
        return n

    return charge


WAYS: dict[str, Callable[[Charge, int], Any]] = {
    "asyncio": lambda charge, n: asyncio.run(charge(n)),
    "anyio": lambda charge, n: anyio.run(charge, n),
    "asgiref": lambda charge, n: async_to_sync(charge)(n),
}


def by_closing(charge: Charge, n: int) -> None:
    """Runs the call in a loop that is closed without being shut down."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(charge(n))
    finally:
        loop.close()


def by_dropping(charge: Charge, n: int) -> None:
    """Runs the call in a loop that is never closed."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(charge(n))


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def open_connections(client: redis.Redis) -> int:
    clients: Any = client.client_list()
    return len(clients)


def timer_renewers() -> int:
    return sum(type(each) is TimerRenewer for each in gc.get_referrers(TimerRenewer))


@pytest.fixture
def bounded(client: redis.Redis) -> Iterator[Bounded]:
    """Checks that at most `more` additional files and connections are open.

    It does not run the garbage collector first.
    """

    def check(more: int) -> None:
        # Threads of the servers and the libraries open files for a moment, too.
        eventually(lambda: open_files() - files <= more, "the files are closed")
        eventually(lambda: open_connections(client) - clients <= more, "the connections are closed")

    open_connections(client)
    gc.collect()
    files, clients, renewers = open_files(), open_connections(client), timer_renewers()
    yield check
    gc.collect()
    assert timer_renewers() - renewers <= 3  # other tests may have left some


@pytest.mark.parametrize("way", exhaustive_except(WAYS, "asyncio"))
def test_a_loop_shut_down_leaves_no_connections(charge: Charge, bounded: Bounded, way: str) -> None:
    # Not by a mark: the fixtures collect the garbage of other tests.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(LOOPS):
            WAYS[way](charge, n)
    bounded(0)


# On a busy machine a renewal may be running when the loop is closed, which Python reports.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.exhaustive
def test_a_loop_that_is_only_closed_leaves_few_open(charge: Charge, bounded: Bounded) -> None:
    gc.disable()
    try:
        for n in range(LOOPS):
            by_closing(charge, n)
            if n % 50 == 49:
                bounded(per_loop.MOST_CLOSED + 1)
        gc.collect()
    finally:
        gc.enable()


# On a busy machine a renewal may be running when the loop is closed, which Python reports.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_connections_of_a_dropped_loop_are_collected(charge: Charge, bounded: Bounded) -> None:
    for n in range(10):
        by_dropping(charge, n)
    gc.collect()
    bounded(0)


def test_threads_leave_no_connections(charge: Charge, idem: Idempotency, bounded: Bounded) -> None:
    with ThreadPoolExecutor(20) as pool:
        barrier = threading.Barrier(20)

        def run(n: int) -> None:
            barrier.wait()
            asyncio.run(charge(n))

        for _ in range(5):
            list(pool.map(run, range(20)))
    idem.close()
    bounded(0)


def test_waiting_calls_leave_no_connections(idem: Idempotency, bounded: Bounded) -> None:
    async def use_engine(n: int) -> None:
        async with idem.execution(n) as first:
            waiting = asyncio.create_task(replay(n))
            await asyncio.sleep(0.01)
            await first.complete("done")
            assert await waiting == "done"

    async def replay(n: int) -> Any:
        async with idem.execution(n) as execution:
            assert execution.decision is Decision.REPLAY
            return execution.replay

    for n in range(30):
        asyncio.run(use_engine(n))
    bounded(0)


def test_an_engine_that_is_dropped_leaves_no_connections_in_a_running_loop(
    server: RedisServer, key: str, bounded: Bounded
) -> None:
    async def use_engine() -> None:
        for n in range(20):
            engine = Idempotency(server.url, key_prefix=key)
            async with engine.execution(n) as execution:
                await execution.complete()
            del engine, execution
        gc.collect()
        deadline = time.monotonic() + SOON
        while open_files() > files + 3:
            assert time.monotonic() < deadline, "connections are still open"
            await asyncio.sleep(POLL_INTERVAL)

    files = open_files()

    asyncio.run(use_engine())
    bounded(0)


def test_aclose_closes_connections(idem: Idempotency, charge: Charge, bounded: Bounded) -> None:
    async def use_engine() -> None:
        await idem.aclose()
        await charge(1)
        await idem.aclose()
        bounded(3)  # of the event loop itself
        await charge(2)
        await idem.aclose()
        await idem.aclose()

    for _ in range(3):
        asyncio.run(use_engine())
    bounded(0)
