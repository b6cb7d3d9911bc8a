"""One client, one private server, all contestants interleaved in one run; medians over rounds."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from redis import Redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.store import commands
from celery_idempotent.store.connection import connect
from celery_idempotent.store.payload import Payload
from celery_idempotent.store.place import Place
from celery_idempotent.store.records import RecordStore
from celery_idempotent.testing.server import RedisServer

ROUNDS, CALLS = 7, 400
RESULT = Payload("json", b'"' + b"x" * 98 + b'"')
NO_OP = "return 1"


def keys() -> Iterator[Key]:
    """Names that nothing has had before."""
    number = 0
    while True:
        number += 1
        yield Key.of("shop.charge", number.to_bytes(8, "big"), b"finger42")


class Contest:
    """The contestants, each one operation."""

    def __init__(self, server: RedisServer) -> None:
        # The same connection settings for all: the client itself is most of the time.
        place = Place(url=server.url)
        self.client: Redis = connect(place)
        self.store = RecordStore(place, lambda record: None)
        self.fresh = keys()
        self.sha = self.client.script_load(NO_OP)
        self.done = next(self.fresh)
        self.run(self.done)

    def begin(self, key: Key) -> Any:
        return self.store.execute(
            commands.begin(
                key,
                owner=os.urandom(16),
                prior=b"",
                task_id="9612edd3-1a0a-4651-aeb1-15d47af714d9",
                worker="celery@host/12345",
                lease_ms=60_000,
                retention_ms=86_400_000,
                max_attempts=5,
                error_ms=86_400_000,
            )
        )

    def run(self, key: Key) -> None:
        token = self.store.record(key, self.begin(key).raw).token
        self.store.execute(commands.complete(key, token, RESULT, 86_400_000))

    def contestants(self) -> dict[str, Callable[[], Any]]:
        return {
            "run: begin + complete": lambda: self.run(next(self.fresh)),
            "two no-op EVALSHA (floor of a run)": lambda: (self.no_op(), self.no_op()),
            "redis-py Lock: acquire + release": self.lock,
            "replay": lambda: self.begin(self.done),
            "one no-op EVALSHA (floor of a replay)": self.no_op,
        }

    def no_op(self) -> None:
        self.client.evalsha(self.sha, 1, "idem:nothing")

    def lock(self) -> None:
        lock = self.client.lock(f"lock:{next(self.fresh)}", timeout=60)
        lock.acquire()
        lock.release()


def median_us(operation: Callable[[], Any]) -> float:
    """Median microseconds of one call."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter_ns()
        operation()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def server_us(client: Redis, operation: Callable[[], Any]) -> float:
    """Mean microseconds that the server spends in one script call."""
    client.config_resetstat()
    for _ in range(CALLS):
        operation()
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def measure_clients(contest: Contest) -> Table:
    contestants = contest.contestants()
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in track(range(ROUNDS), description="measuring", transient=True):
        for name, operation in contestants.items():
            rounds[name].append(median_us(operation))
    table = Table("one client, loopback", "µs, median of medians", "spread", title="Seconds")
    for name, values in rounds.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        table.add_row(name, f"{statistics.median(values):.0f}", spread)
    run, floor, lock, replay, one = (statistics.median(values) for values in rounds.values())
    table.add_section()
    table.add_row("run / its floor", f"{run / floor:.2f}", "")
    table.add_row("run / redis-py Lock", f"{run / lock:.2f}", "")
    table.add_row("replay / its floor", f"{replay / one:.2f}", "")
    return table


def measure_server(contest: Contest) -> Table:
    client = contest.client
    begun = [(key, contest.store.record(key, contest.begin(key).raw).token) for key in take(CALLS)]
    waiting = iter(begun)

    def complete() -> None:
        key, token = next(waiting)
        contest.store.execute(commands.complete(key, token, RESULT, 86_400_000))

    name = contest.store.name(contest.done)
    table = Table("on the server", "", title="Counts")
    operations: dict[str, Callable[[], Any]] = {
        "begin, key absent": lambda: contest.begin(next(FRESH)),
        "complete": complete,
        "replay": lambda: contest.begin(contest.done),
        "no-op script": contest.no_op,
    }
    for what, operation in operations.items():
        table.add_row(f"{what}, µs", f"{server_us(client, operation):.1f}")
    table.add_row("bytes of a completed record, 100-byte result", str(client.memory_usage(name)))
    return table


FRESH = (Key.of("shop.refund", number.to_bytes(8, "big")) for number in range(10**9))


def take(count: int) -> list[Key]:
    return [next(FRESH) for _ in range(count)]


def measure_keys() -> Table:
    def task(customer: int, order: str, amount: float, currency: str, live: bool) -> None: ...

    arguments = (17, "order-42", 9.99, "EUR", True)
    rule = KeyRule("shop.charge", None, signature(task), lambda args, kwargs: (args, kwargs))
    template = KeyRule(
        "shop.charge", "order:{order}", signature(task), lambda args, kwargs: (args, kwargs)
    )
    table = Table("key of five scalars", "µs", title="Keys")
    table.add_row("all arguments", f"{median_us(lambda: rule.derive(arguments, {})):.1f}")
    table.add_row("template", f"{median_us(lambda: template.derive(arguments, {})):.1f}")
    return table


def main() -> None:
    console = Console()
    with RedisServer.start() as server:
        console.print(f"{server.flavour} {server.version}, {os.cpu_count()} cores")
        contest = Contest(server)
        for table in (measure_clients(contest), measure_server(contest), measure_keys()):
            console.print(table)


if __name__ == "__main__":
    main()
