"""``make find``: how soon the dashboard finds records, and what other clients of Redis notice.

A server is filled by the real scripts. Then the dashboard's process is asked for the first page of
each kind of filter, while another process sends PING to the same server.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from redis import Redis

from celery_idempotent.core.key.key import Key
from celery_idempotent.core.record import layout
from celery_idempotent.core.record.payload import Payload
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.run_sync import run_sync
from tests.dashboard.conftest import dashboard
from tests.dashboard.shop import URL_VARIABLE, make_app
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

CHUNK = 1_000
TASKS = 40
DAY_MS = 24 * 3600 * 1000
PING_INTERVAL = 0.002


def task_of(number: int) -> str:
    """A few tasks have most records."""
    return f"shop.task{int(TASKS * (number * 0.618034 % 1) ** 3):02}"


def begin_of(number: int) -> Command:
    data = blake2b(b"%d" % number, digest_size=40).digest()
    return commands.begin(
        Key.of(task_of(number), data[:8], data[8:16]),
        execution_id=data[16:24],
        task_id=str(UUID(bytes=data[24:40])),
        worker=f"worker{number % 20}@here/{1000 + number % 80}",
        lease_ms=DAY_MS,
        retention_ms=DAY_MS,
        label=f"order {number}",
    )


def end_of(number: int, key: Key, token: int) -> Command | None:
    """One of 50 has failed, and one of 1,000 runs."""
    if number % 1_000 == 7:
        return None
    end = commands.fail if number % 50 == 3 else commands.complete
    return end(key, token, Payload("json", b'{"amount": %d}' % number), DAY_MS)


def fill(store: RecordStore, records: int) -> None:
    for first in range(0, records, CHUNK):
        numbers = range(first, min(records, first + CHUNK))
        begins = [begin_of(number) for number in numbers]
        replies = run_sync(store.execute_all(begins))
        ends = []
        for number, begin, reply in zip(numbers, begins, replies, strict=True):
            assert not isinstance(reply, Exception), reply
            end = end_of(number, begin.key, layout.begun(reply.raw).token)
            ends += [end] if end is not None else []
        run_sync(store.execute_all(ends))


def filters(records: int) -> Iterator[tuple[str, dict[str, Any]]]:
    middle = begin_of(records // 2)
    yield "all", {}
    for state in ("RESERVED", "STARTED", "COMPLETED", "FAILED", "CORRUPT"):
        yield f"state {state}", {"state": state}
    yield "task, a frequent one", {"task": "task00"}
    yield "task, a rare one", {"task": f"task{TASKS - 1}"}
    yield "task and state", {"task": "task0", "state": "FAILED"}
    yield "part of a label", {"text": f"order {records // 2}"}
    yield "key", {"text": str(middle.key)}
    yield "part of a key", {"text": middle.key.digest[5:12]}
    yield "worker", {"text": "worker7@here"}
    yield "text that none has", {"text": "no record has this"}
    yield "text and state", {"text": "order 99", "state": "FAILED"}
    yield "older than a minute", {"older_than": "1m"}
    yield "older than a day", {"older_than": "1d"}
    for sort in ("since", "task", "-task", "state", "attempt", "duration", "-duration"):
        yield f"sorted by {sort}", {"sort": sort}
    yield "page 1,000", {"cursor": "50000"}


def ping(url: str, end: Connection) -> None:
    """Times PING until `end` says stop, then sends the seconds of each."""
    client, times = Redis.from_url(url), []
    client.ping()
    end.send(None)
    while not end.poll(PING_INTERVAL):
        started_at = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - started_at)
    end.send(times)


class Pings:
    """PING in a process of its own, while the block runs."""

    def __init__(self, url: str) -> None:
        self._end, other = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=ping, args=(url, other))

    def __enter__(self) -> Pings:
        self._process.start()
        self._end.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.send(None)
        times = sorted(self._end.recv())
        self._process.join()
        print(
            f"    PING: median {statistics.median(times) * 1e3:.2f} ms, "
            f"p99 {times[len(times) * 99 // 100] * 1e3:.2f} ms, "
            f"longest {times[-1] * 1e3:.2f} ms ({len(times):,})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m labs.find", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10, help="requests of each page")
    arguments = parser.parse_args()
    with RedisServer.start() as server:
        os.environ[URL_VARIABLE] = server.url
        app = make_app(server.url)
        store = app.tasks["shop.charge"].idempotency_configuration.executor.store
        started_at = time.monotonic()
        fill(store, arguments.records)
        client = server.client()
        client.set(f"idem:{task_of(1)}:{'x' * 22}", b"damaged")
        memory = client.info("memory")["used_memory"] / arguments.records
        print(
            f"{client.dbsize():,} keys in {time.monotonic() - started_at:.0f} s, "
            f"{memory:.0f} bytes each",
            flush=True,
        )
        print("Nothing else runs:")
        with Pings(server.url):
            time.sleep(5)
        with dashboard("tests.dashboard.shop", **{URL_VARIABLE: server.url}) as (url, process):
            measure(url, process.pid, server.url, arguments)


def measure(url: str, pid: int, redis_url: str, arguments: argparse.Namespace) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:

        def counted() -> bool:
            body = http.get("/api/stats").raise_for_status().json()
            return body["counted_at"] is not None

        started_at = time.monotonic()
        print("The first pass over all records:")
        with Pings(redis_url):
            eventually(counted, "all records are indexed", 600)
        print(f"    {time.monotonic() - started_at:.0f} s, {resident(pid):.0f} MiB in the process")
        print("First pages, beside the next passes:")
        with Pings(redis_url):
            for name, parameters in filters(arguments.records):
                times, rows = [], 0
                for _ in range(arguments.rounds):
                    sent_at = time.perf_counter()
                    page = http.get("/records", params=parameters).raise_for_status().text
                    times.append(time.perf_counter() - sent_at)
                    rows = page.count('name="key"')
                print(
                    f"    {name:22} {rows:3} rows  median {statistics.median(times) * 1e3:4.0f} ms"
                    f"  longest {max(times) * 1e3:4.0f} ms",
                    flush=True,
                )


def resident(pid: int) -> float:
    """Returns the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
