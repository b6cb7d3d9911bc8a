"""The measures. Each client has connections of its own and sends what one worker process sends.

All clients live in a few processes with event loops, which share the machine's cores with the
server: the rates are what this machine shows, not what Redis could do alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from celery_idempotent import Decision, Idempotency
from celery_idempotent.key.key import Key
from celery_idempotent.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.lease.clock import lease_now
from celery_idempotent.lease.lease import Lease
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, LeaseExtension
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from labs.redelivery.cost import processor_seconds
from tests.servers.groups import ClusterServers
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

TASK = "shop.charge"
LEASE_MS, RETENTION_MS = 60_000, 3_600_000
#: Event loops that share the clients.
LOOPS = 2
#: Leases that one client renews in one round trip.
LEASES_PER_CLIENT = 1_000


def make_store(url: str, *, is_async: bool = True, timeout: float = 30.0) -> RecordStore:
    config = StoreConfig(url=url, prefix="scale", timeout=timeout)
    return RecordStore(config, lambda record: record.body, is_async=is_async)


def begin(lease_ms: int = LEASE_MS) -> Command:
    return commands.begin(
        Key.of(TASK, os.urandom(8)),
        execution_id=os.urandom(8),
        unanswered_ids=b"",
        task_id=f"{random.getrandbits(128):032x}",
        root=os.urandom(8),
        worker=f"worker@host/{os.getpid()}",
        lease_ms=lease_ms,
        retention_ms=RETENTION_MS,
        max_attempts=5,
        error_ms=RETENTION_MS,
    )


def in_loops(work: Callable[..., Awaitable[Any]], shares: Iterable[Any]) -> list[Any]:
    """Runs `work` with each of `shares`, in an event loop of a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(LOOPS, mp_context=context) as pool:
        return [*pool.map(partial(_run, work), shares)]


def _run(work: Callable[..., Awaitable[Any]], share: Any) -> Any:
    return asyncio.run(work(*share))  # type: ignore[arg-type]


def cpu_seconds(server: RedisServer) -> float:
    with server.client() as client:
        return processor_seconds(client.info("server")["process_id"])


# Connections.


async def load(url: str, clients: int, rate: float, seconds: float) -> list[float]:
    """Runs `rate` calls a second from `clients`; returns the seconds of each begin."""
    stores = [make_store(url) for _ in range(clients)]
    await asyncio.gather(*(store.ping() for store in stores))
    until, times = time.monotonic() + seconds, list[float]()

    async def client(store: RecordStore) -> None:
        while (pause := random.expovariate(rate / clients)) < until - time.monotonic():
            await asyncio.sleep(pause)
            command, sent_at = begin(), time.perf_counter()
            reply = await store.execute(command)
            times.append(time.perf_counter() - sent_at)
            await asyncio.sleep(random.uniform(0, 0.1))
            token = layout.begun(reply.raw).token
            value = Payload("json", b'"charged"')
            await store.execute(commands.complete(command.key, token, value, RETENTION_MS))

    await asyncio.gather(*map(client, stores))
    for store in stores:
        await store.aclose()
    return times


def connections(clients: int, rate: float, seconds: float) -> None:
    with RedisServer.start() as server:
        before = cpu_seconds(server)
        shares = [(server.url, clients // LOOPS, rate / LOOPS, seconds)] * LOOPS
        times = sorted(chain(*in_loops(load, shares)))
        share = (cpu_seconds(server) - before) / seconds
    print(
        f"{clients:6,} clients, {rate:5,.0f} calls/s wanted, {len(times) / seconds:5,.0f} made: "
        f"begin median {statistics.median(times) * 1e3:.2f} ms, "
        f"p99 {times[len(times) * 99 // 100] * 1e3:.1f} ms, longest {times[-1] * 1e3:.0f} ms; "
        f"server {share:.0%} of a core",
        flush=True,
    )


# A key that many wait for.


async def wait(url: str, waiters: int) -> tuple[float, int]:
    """Waits for the key; returns when the last of `waiters` had the outcome, and their number."""
    idem = Idempotency(url, name="scale", on_conflict="wait", wait_timeout=300.0)

    async def one() -> Decision:
        async with idem.execution("hot") as execution:
            return execution.decision

    decisions = await asyncio.gather(*(one() for _ in range(waiters)))
    ended_at = time.time()
    await idem.aclose()
    return ended_at, decisions.count(Decision.REPLAY)


def hot_key(waiters: int, seconds: float) -> None:
    with RedisServer.start() as server, server.client() as client:
        idem = Idempotency(server.url, name="scale")

        def scripts() -> int:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        with idem.execution("hot") as execution, ThreadPoolExecutor(1) as runner:
            before, share = scripts(), (server.url, waiters // LOOPS)
            waiting = runner.submit(in_loops, wait, [share] * LOOPS)
            eventually(lambda: scripts() >= before + waiters, "all wait", 120)
            used, sent = cpu_seconds(server), scripts()
            time.sleep(seconds)
            used, sent = cpu_seconds(server) - used, scripts() - sent
            execution.complete("charged")
            completed_at = time.time()
            results = waiting.result()
        idem.close()
    last = max(ended_at for ended_at, _ in results) - completed_at
    print(
        f"{waiters:6,} waiters for one key: {sum(number for _, number in results):,} got the "
        f"outcome, the last one after {last:.2f} s; before, they sent {sent / seconds:,.0f} "
        f"scripts/s, {used / seconds:.1%} of a core of the server",
        flush=True,
    )


# Leases.


async def hold(store: RecordStore, number: int, lease_ms: int) -> list[LeaseExtension]:
    """Begins `number` executions; returns what extends their leases."""
    begins = [begin(lease_ms) for _ in range(number)]
    replies = await store.execute_all(begins)
    return [
        LeaseExtension(command.key, layout.begun(reply.raw).token, lease_ms, RETENTION_MS)
        for command, reply in zip(begins, replies, strict=True)
        if not isinstance(reply, Exception)
    ]


async def renew(url: str, clients: int, rounds: int) -> list[float]:
    """Renews the leases of `clients` again and again; returns the seconds of each round."""
    stores = [make_store(url) for _ in range(clients)]
    leases = [await hold(store, LEASES_PER_CLIENT, LEASE_MS) for store in stores]
    times = []
    for _ in range(rounds):
        started_at = time.perf_counter()
        replies = await asyncio.gather(*map(RecordStore.extend, stores, leases))
        times.append(time.perf_counter() - started_at)
        assert all(reply.case == "ok" for each in replies for reply in each)
    for store in stores:
        await store.aclose()
    return times


def leases(number: int, rounds: int) -> None:
    with RedisServer.start() as server:
        before = cpu_seconds(server)
        clients = number // LEASES_PER_CLIENT
        rounds_of = in_loops(renew, [(server.url, clients // LOOPS, rounds)] * LOOPS)
        used = cpu_seconds(server) - before
    times = sorted(chain(*rounds_of))
    each = used / (number * (rounds + 1))  # a begin costs about as much as an extension
    share = 3 * number * each / (LEASE_MS / 1e3)
    print(
        f"{number:6,} leases: all renewed in {statistics.median(times):.2f} s (longest "
        f"{times[-1]:.2f} s), {each * 1e6:.1f} µs of the server each: {share:.1%} of a core with "
        f"leases of {LEASE_MS // 1000} s",
        flush=True,
    )


# Failover.


async def survive(url: str, clients: int, lease_ms: int, seconds: float) -> tuple[int, int, int]:
    """Lets the heartbeat renew leases; returns how many were held, lost, and not trusted once."""
    stores = [make_store(url, timeout=2.0) for _ in range(clients)]
    held, lost, doubted = list[Lease](), list[bytes](), set[Lease]()
    for store in stores:
        renewer = asyncio_heartbeat().renewer(store)
        for extension in await hold(store, LEASES_PER_CLIENT, lease_ms):
            held.append(Lease(store, extension, lease_now(), lost.append))
            renewer.start_renewal(held[-1])
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(0.2)
        doubted.update(lease for lease in held if not lease.trusted)
    for store in stores:
        await store.aclose()
    return len(held), len(lost), len(doubted)


def failover(number: int, lease_ms: int, seconds: float) -> None:
    with ClusterServers.start() as cluster, ThreadPoolExecutor(1) as runner:
        clients = number // LEASES_PER_CLIENT // LOOPS
        shares = [(cluster.url, clients, lease_ms, seconds)] * LOOPS
        surviving = runner.submit(in_loops, survive, shares)
        time.sleep(seconds / 3)
        started_at = time.monotonic()
        cluster.kill_master_of("any", abrupt=True)
        promoted = time.monotonic() - started_at
        held, lost, doubted = map(sum, zip(*surviving.result(), strict=True))
    print(
        f"{held:6,} leases of {lease_ms / 1000:g} s on a Cluster of three, a master killed: its "
        f"replica was promoted after {promoted:.1f} s; {lost:,} leases were lost, {doubted:,} not "
        f"trusted for a while",
        flush=True,
    )


# Memory.

#: Copies a record under names as long as its own.
_COPY = """
local raw, begin = redis.call('GET', KEYS[1]), string.sub(KEYS[1], 1, -13)
for number = ARGV[1], ARGV[2] do
  redis.call('SET', begin .. string.format('%012d', number), raw, 'PX', ARGV[3])
end
"""
_CHUNK = 100_000


def memory(records: int) -> None:
    with RedisServer.start() as server, server.client(socket_timeout=None) as client:
        store = make_store(server.url, is_async=False)
        command = begin()
        reply = run_sync(store.execute(command))
        token, value = layout.begun(reply.raw).token, Payload("json", b'"%s"' % (b"x" * 98))
        run_sync(store.execute(commands.complete(command.key, token, value, RETENTION_MS)))
        before = client.info("memory")["used_memory"]
        name = store.name(command.key)
        for first in range(0, records, _CHUNK):
            last = min(records, first + _CHUNK) - 1
            client.eval(_COPY, 1, name, first, last, 24 * RETENTION_MS)
        info = client.info("memory")
        each = (info["used_memory"] - before) / records
        sent_at = time.perf_counter()
        run_sync(store.execute(begin()))
        latency = time.perf_counter() - sent_at
        with suppress(Exception):
            client.shutdown(nosave=True)
    print(
        f"{records:10,} records with results of 100 bytes: {each:.0f} bytes each, "
        f"{info['used_memory_rss'] / 2**30:.2f} GiB resident; 100,000,000 would need "
        f"{each * 1e8 / 2**30:.0f} GiB; a begin takes {latency * 1e3:.1f} ms",
        flush=True,
    )
