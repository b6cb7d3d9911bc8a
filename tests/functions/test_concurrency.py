"""Concurrent calls of one function: one execution, with a lease that is renewed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from celery_idempotent import Idempotency
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.functions.asyncio_heartbeat import asyncio_heartbeat
from tests.functions.conftest import LEASE
from tests.servers.redis_server import RedisServer
from tests.waiting import POLL_INTERVAL, eventually, eventually_async

Run = Callable[[Coroutine[Any, Any, Any]], Any]
CALLERS = 50
REPOSITORY = Path(__file__).parents[2]


def start_callers(*arguments: str) -> subprocess.Popen[str]:
    """Starts `call_in_processes` with these arguments, of which the last is optional."""
    command = [sys.executable, "-m", "tests.functions.test_concurrency", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def call_in_processes(url: str, key: str, number: str, *forever: str) -> None:
    """Forks processes that call one function, perhaps forever, and print what it returns."""
    # On a busy machine each of fifty processes may wait for seconds, which must not end a lease. A
    # process that the test kills has a short lease.
    idem = Idempotency(url, key_prefix=key, lease=1 if forever else 30, wait_timeout=60)

    @idem.idempotent(key="{order}", name="functions.caller")
    def charge(order: str) -> str:
        redis.Redis.from_url(url).rpush(f"runs:{order}", os.getpid())
        time.sleep(3600 if forever else 0.5)
        return f"receipt-{os.getpid()}-{idem.current.attempt}"

    children = []
    for _ in range(int(number)):
        child = os.fork() if not forever else 0
        if child == 0:
            os.write(1, f"{charge(key)}\n".encode())
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


class TestSingleFlight:
    """50 callers use one key: one execution runs, and all get its result."""

    def test_threads(self, idem: Idempotency, key: str) -> None:
        runs = []

        @idem.idempotent(name="charge", key="{order}")
        def charge(order: str) -> str:
            runs.append(order)
            time.sleep(0.3)
            return f"receipt {len(runs)}"

        with ThreadPoolExecutor(CALLERS) as pool:
            results = list(pool.map(charge, [key] * CALLERS))

        assert len(runs) == 1
        assert results == ["receipt 1"] * CALLERS

    def test_tasks_on_one_event_loop(self, idem: Idempotency, run: Run, key: str) -> None:
        runs = []

        @idem.idempotent(name="charge", key="{order}")
        async def charge(order: str) -> str:
            runs.append(order)
            await asyncio.sleep(0.3)
            return f"receipt {len(runs)}"

        async def call_all() -> list[str]:
            return await asyncio.gather(*(charge(key) for _ in range(CALLERS)))

        assert run(call_all()) == ["receipt 1"] * CALLERS
        assert len(runs) == 1

    @pytest.mark.exhaustive
    def test_processes_after_one_was_killed(
        self, server: RedisServer, client: redis.Redis, key: str
    ) -> None:
        def has_renewed() -> bool:
            (name,) = client.keys(f"{key}:functions.caller:*")
            return client.get(name)[:1] == b"A"  # the begins of those that renew nothing are free

        victim = start_callers(server.url, key, "1", "forever")
        try:
            eventually(lambda: client.llen(f"runs:{key}") == 1, seconds=30)
            eventually(has_renewed, seconds=30)
        finally:
            victim.kill()
            victim.communicate()
        # Two processes that fork: fifty starts of Python would take a minute.
        scripts = [start_callers(server.url, key, str(CALLERS // 2)) for _ in range(2)]
        try:
            outputs = [process.communicate(timeout=100)[0] for process in scripts]
            results = "".join(outputs).split()
        finally:
            for process in scripts:
                process.kill()

        assert client.llen(f"runs:{key}") == 2
        assert results == [results[0]] * CALLERS
        assert results[0].endswith("-2"), "its attempt"


class TestHeartbeat:
    @pytest.mark.exhaustive
    def test_a_long_await_needs_no_thread(self, idem: Idempotency, run: Run, key: str) -> None:
        @idem.idempotent(key="{order}", name="shop.long")
        async def charge(order: str) -> int:
            await asyncio.sleep(1.8 * LEASE)
            idem.current.check()
            return idem.current.attempt

        async def call_later() -> int:
            await asyncio.sleep(1.4 * LEASE)
            return await charge(key)

        async def call_both() -> Any:
            threads = threading.active_count()
            results = await asyncio.gather(charge(key), call_later())
            assert not asyncio_heartbeat().leases()
            assert threading.active_count() <= threads
            return results

        assert run(call_both()) == [1, 1]

    def test_one_round_trip_extends_all_leases_of_a_loop(
        self, idem: Idempotency, run: Run, client: redis.Redis, key: str
    ) -> None:
        async def renew() -> list[int]:
            store = idem.async_executor.store
            extend, sizes = store.extend, []

            async def count_leases(leases: Any, timeout: float) -> Any:
                sizes.append(len(leases))
                return await extend(leases, timeout)

            store.extend = count_leases  # type: ignore[method-assign]
            sent_at = time.monotonic()
            keys = [idem.key_of(f"{key}:{n}") for n in range(20)]
            extensions = [LeaseExtension(each, n, 300, 1000) for n, each in enumerate(keys, 1)]
            leases = [Lease(store, each, sent_at, lambda raw: lost.set()) for each in extensions]
            for lease in leases:
                asyncio_heartbeat().renewer(lease.store).start_renewal(lease)
            await asyncio.wait_for(lost.wait(), 10)  # no execution has these tokens
            return sizes

        lost = asyncio.Event()
        # A second renewal may be sent before the test ends.
        assert set(run(renew())) == {20}

    @pytest.mark.exhaustive
    def test_frozen_servers_delay_no_renewals(self, idem: Idempotency, run: Run, key: str) -> None:
        async def hold(others: list[RedisServer]) -> None:
            engines = [Idempotency(other.url, lease=LEASE) for other in others]
            async with idem.execution(key) as execution:
                for engine in engines:
                    store = engine.async_executor.store
                    extension = LeaseExtension(engine.key_of(key), 1, int(LEASE * 1000), 1000)
                    lease = Lease(store, extension, time.monotonic(), lambda raw: None)
                    asyncio_heartbeat().renewer(lease.store).start_renewal(lease)
                for other in others:
                    other.pause()
                began_at = time.monotonic()
                while time.monotonic() < began_at + 2 * LEASE:
                    execution.check()
                    await asyncio.sleep(POLL_INTERVAL)
            for lease in asyncio_heartbeat().leases():
                asyncio_heartbeat().renewer(lease.store).stop_renewal(lease)
            await eventually_async(lambda: len(asyncio.all_tasks()) == 1, "no request is left")
            for engine in engines:
                await engine.aclose()

        with ExitStack() as stack:
            # As many as would use up the lease, if one request followed the other.
            run(hold([stack.enter_context(RedisServer.start(config={})) for _ in range(6)]))


if __name__ == "__main__":
    call_in_processes(*sys.argv[1:])
