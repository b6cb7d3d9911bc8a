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
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from celery_idempotent import Decision, Idempotency, StoreUnavailableError
from celery_idempotent.core.key.key import Key
from celery_idempotent.core.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.core.lease.clock import lease_now
from celery_idempotent.core.lease.lease import Lease
from celery_idempotent.core.record import layout
from celery_idempotent.core.record.payload import Payload
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command, LeaseExtension
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from labs.rig.processes import processor_seconds
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

TASK = "shop.charge"
LEASE_MS, RETENTION_MS = 60_000, 3_600_000
#: Calls of each client before it is measured, which connect it to each master of a Cluster.
FIRST_CALLS = 10
#: Event loops that share the clients.
LOOPS = 2
#: Leases that one client renews in one round trip.
LEASES_PER_CLIENT = 1_000


def make_store(url: str, *, is_async: bool = True, timeout: float = 30.0) -> RecordStore:
    options = {"master_name": SentinelServers.master_name} if url.startswith("sentinel") else {}
    config = StoreConfig(url=url, options=options, prefix="scale", timeout=timeout)
    return RecordStore(config, lambda record: record.body, is_async=is_async)


def begin(lease_ms: int = LEASE_MS) -> Command:
    return commands.begin(
        Key.of(TASK, os.urandom(8)),
        execution_id=os.urandom(8),
        task_id=f"{random.getrandbits(128):032x}",
        worker=f"worker@host/{os.getpid()}",
        lease_ms=lease_ms,
        retention_ms=RETENTION_MS,
    )


def in_loops(work: Callable[..., Awaitable[Any]], shares: Iterable[Any]) -> list[Any]:
    """Runs `work` with each of `shares`, in an event loop of a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(LOOPS, mp_context=context) as pool:
        return [*pool.map(partial(_run, work), shares)]


def _run(work: Callable[..., Awaitable[Any]], share: Any) -> Any:
    return asyncio.run(work(*share))  # type: ignore[arg-type]


def cpu_seconds(*servers: RedisServer) -> float:
    seconds = 0.0
    for server in servers:
        with server.client() as client:
            seconds += processor_seconds(client.info("server")["process_id"])
    return seconds


def records(*servers: RedisServer) -> int:
    """Returns the number of records in the masters of `servers`."""
    number = 0
    for server in servers:
        with server.client() as client:
            number += client.dbsize() if client.role()[0] == b"master" else 0
    return number


# Connections.


class Calls(NamedTuple):
    """What happened to the calls of a load."""

    #: The seconds of each begin.
    times: list[float]
    #: When each error was raised, because Redis did not reply.
    errors: list[float]
    #: The tokens of the executions whose record was gone at their end.
    lost: list[int]


async def connect(url: str, clients: int, timeout: float = 30.0) -> list[RecordStore]:
    stores = [make_store(url, timeout=timeout) for _ in range(clients)]
    for store in stores:  # one by one: a client of a Cluster reads much when it connects
        for _ in range(FIRST_CALLS):
            await store.execute(begin())
    return stores


async def load(url: str, clients: int, rate: float, seconds: float) -> Calls:
    """Runs `rate` calls a second from `clients`."""
    return await make_calls(await connect(url, clients), rate / clients, seconds)


async def make_calls(stores: list[RecordStore], rate: float, seconds: float) -> Calls:
    """Makes `rate` calls a second from each store, and closes it."""
    until, calls = time.monotonic() + seconds, Calls([], [], [])

    async def call(store: RecordStore) -> None:
        command, sent_at = begin(), time.perf_counter()
        reply = await store.execute(command)
        calls.times.append(time.perf_counter() - sent_at)
        await asyncio.sleep(random.uniform(0, 0.1))
        token, value = layout.begun(reply.raw).token, Payload("json", b'"charged"')
        completed = await store.execute(commands.complete(command.key, token, value, RETENTION_MS))
        if completed.case != "ok":
            calls.lost.append(token)

    async def client(store: RecordStore) -> None:
        while (pause := random.expovariate(rate)) < until - time.monotonic():
            await asyncio.sleep(pause)
            try:
                await call(store)
            except StoreUnavailableError:
                calls.errors.append(time.time())

    await asyncio.gather(*map(client, stores))
    for store in stores:
        await store.aclose()
    return calls


def connections(
    clients: int,
    rate: float,
    seconds: float,
    start: Callable[[], RedisServer | ClusterServers] = RedisServer.start,
) -> None:
    with start() as servers, ThreadPoolExecutor(1) as runner:
        nodes = servers.nodes if isinstance(servers, ClusterServers) else (servers,)
        shares = [(servers.url, clients // LOOPS, rate / LOOPS, seconds)] * LOOPS
        loading = runner.submit(in_loops, load, shares)
        connected = clients // LOOPS * LOOPS * FIRST_CALLS
        eventually(lambda: records(*nodes) >= connected, "all clients are connected", 600)
        before = cpu_seconds(*nodes)
        loads: list[Calls] = loading.result()
        share = (cpu_seconds(*nodes) - before) / seconds
    times = sorted(chain(*(calls.times for calls in loads)))
    kind = "a Cluster of three" if isinstance(servers, ClusterServers) else "one Redis"
    print(
        f"{clients:6,} clients of {kind}, {rate:5,.0f} calls/s wanted, "
        f"{len(times) / seconds:5,.0f} made: begin median {statistics.median(times) * 1e3:.2f} ms, "
        f"p99 {times[len(times) * 99 // 100] * 1e3:.1f} ms, longest {times[-1] * 1e3:.0f} ms; "
        f"{sum(len(calls.errors) for calls in loads)} errors; server {share:.0%} of a core",
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


# Failover.


async def hold(store: RecordStore, number: int, lease_ms: int) -> list[LeaseExtension]:
    """Begins `number` executions; returns what extends their leases."""
    begins = [begin(lease_ms) for _ in range(number)]
    replies = await store.execute_all(begins)
    return [
        LeaseExtension(command.key, layout.begun(reply.raw).token, lease_ms, RETENTION_MS)
        for command, reply in zip(begins, replies, strict=True)
        if not isinstance(reply, Exception)
    ]


async def survive(
    url: str, clients: int, rate: float, lease_ms: int, seconds: float
) -> tuple[int, int, int, Calls]:
    """Lets the heartbeat renew leases while calls run.

    Returns:
        The numbers of leases held, lost, and not trusted for a while; and the calls.
    """
    callers, stores = await connect(url, clients, 2.0), await connect(url, clients, 2.0)
    held, lost, doubted = list[Lease](), list[bytes](), set[Lease]()
    for store in stores:
        renewer = asyncio_heartbeat().renewer(store)
        for extension in await hold(store, LEASES_PER_CLIENT, lease_ms):
            held.append(Lease(store, extension, lease_now(), lost.append))
            renewer.start_renewal(held[-1])
    loading = asyncio.create_task(make_calls(callers, rate / clients, seconds))
    while not loading.done():
        await asyncio.sleep(0.2)
        doubted.update(lease for lease in held if not lease.trusted)
    for lease in held:
        asyncio_heartbeat().renewer(lease.store).stop_renewal(lease)
    for store in stores:
        await store.aclose()
    return len(held), len(lost), len(doubted), loading.result()


def failover(
    number: int,
    rate: float,
    lease_ms: int,
    seconds: float,
    servers: ClusterServers | SentinelServers,
) -> None:
    with servers, ThreadPoolExecutor(1) as runner:
        clients = number // LEASES_PER_CLIENT // LOOPS
        shares = [(servers.url, clients, rate / LOOPS, lease_ms, seconds)] * LOOPS
        surviving = runner.submit(in_loops, survive, shares)
        enough = number + 2 * rate
        eventually(lambda: records(*servers.nodes) > enough, "calls for two seconds", 120 + seconds)
        killed_at = time.time()
        if isinstance(servers, ClusterServers):
            kind, _ = "a Cluster of three", servers.kill_master_of("any", abrupt=True)
        else:
            kind, _ = "a Redis with Sentinel", servers.failover(abrupt=True)
        promoted = time.time() - killed_at
        *counts, calls = zip(*surviving.result(), strict=True)
    held, lost, doubted = map(sum, counts)
    errors = [*chain(*(each.errors for each in calls))]
    print(
        f"{held:6,} leases of {lease_ms / 1000:g} s on {kind}, a master killed: its "
        f"replica was promoted after {promoted:.1f} s; {lost:,} leases were lost, {doubted:,} not "
        f"trusted for a while; of {sum(len(each.times) for each in calls):,} calls, "
        f"{sum(len(each.lost) for each in calls)} lost their record; {len(errors)} errors, the "
        f"last one after {max(errors, default=killed_at) - killed_at:.1f} s",
        flush=True,
    )
