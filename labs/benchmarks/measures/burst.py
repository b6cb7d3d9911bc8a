"""Compares one script with WATCH, MULTI and EXEC, for many clients and one key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import quantiles

from redis import Redis
from redis.exceptions import WatchError

from celery_idempotent import Idempotency
from labs.benchmarks.bench import RETENTION_MS, make_result, private_server
from labs.benchmarks.figure import Bars, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds, round_order
from labs.benchmarks.measure import Measure, ProgressCallback
from tests.servers.redis_server import RedisServer

OURS, WATCH = "celery-idempotent", "WATCH, MULTI, EXEC"

#: Sends one request for a key and returns its result.
Request = Callable[[str], object]

#: The interval at which WATCH clients poll for the result, in seconds: first and longest.
FIRST_POLL, LONGEST_POLL = 0.02, 0.2

RESULT = make_result(100).body.decode()
IN_PROGRESS = b"in progress"


class Burst(Measure):
    """200 clients send 10 requests each, one after another, for the same key; the work takes 50 ms.

    Requests that arrive meanwhile wait: celery-idempotent for a CLIENT TRACKING invalidation, the
    WATCH implementation for its next poll. The clients are threads of one process, which limits
    the throughput before Redis does.
    """

    name = "burst"
    title = "200 clients × 10 requests on one key, 50 ms of work"

    CLIENTS, REQUESTS, ROUNDS = 200, 10, 9
    WORK = 0.05

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        rates: Rounds = {OURS: [], WATCH: []}
        slowest: Rounds = {OURS: [], WATCH: []}
        with private_server(maxclients="2000") as server:
            requests = {OURS: self._idempotent(server), WATCH: self._by_watch(server)}
            keys = count()
            with ThreadPoolExecutor(self.CLIENTS) as pool:
                for number in range(-1, self.ROUNDS):  # round -1 connects
                    for name in round_order(requests, max(number, 0)):
                        rate, p99 = self._round(pool, requests[name], f"key-{next(keys)}")
                        if number >= 0:
                            rates[name].append(rate)
                            slowest[name].append(p99)
                    progress((number + 1) / self.ROUNDS)
        ratios = {
            "throughput": (Spread.from_ratios(rates[OURS], rates[WATCH]), Goal(2.3, "≥")),
            "p99": (Spread.from_ratios(slowest[OURS], slowest[WATCH]), Goal(0.36)),
        }
        p99 = {name: Spread.from_values(each) for name, each in slowest.items()}
        return MeasureResult(
            [
                *(
                    Figure.from_spread(f"{name}, ours / WATCH", spread, "×", goal)
                    for name, (spread, goal) in ratios.items()
                ),
                *(
                    Figure.from_spread(
                        f"{name}, throughput", Spread.from_values(each), "requests/s"
                    )
                    for name, each in rates.items()
                ),
                *(Figure.from_spread(f"{name}, p99", each, "ms") for name, each in p99.items()),
            ],
            [Bars("p99 of 200 clients on one key", "ms", p99, (OURS,))],
            {"requests per second": rates, "p99, ms": slowest},
        )

    def _round(self, pool: ThreadPoolExecutor, request: Request, key: str) -> tuple[float, float]:
        """Returns requests per second, and the p99 of their durations in milliseconds."""
        ready = threading.Barrier(self.CLIENTS + 1)

        def client() -> list[float]:
            ready.wait()
            durations = []
            for _ in range(self.REQUESTS):
                started_at = time.perf_counter()
                request(key)
                durations.append(time.perf_counter() - started_at)
            return durations

        clients = [pool.submit(client) for _ in range(self.CLIENTS)]
        ready.wait()
        started_at = time.perf_counter()
        durations = [seconds for each in clients for seconds in each.result()]
        rate = len(durations) / (time.perf_counter() - started_at)
        return rate, 1000 * quantiles(durations, n=100)[98]

    def _work(self) -> str:
        time.sleep(self.WORK)
        return RESULT

    def _idempotent(self, server: RedisServer) -> Request:
        idem = Idempotency(server.url, on_conflict="wait", wait_timeout=60)
        return idem.idempotent(lambda key: self._work(), name="shop.charge")

    def _by_watch(self, server: RedisServer) -> Request:
        client = server.client(max_connections=2 * self.CLIENTS)

        def request(key: str) -> object:
            for interval in _poll_intervals():
                value = _begin_by_watch(client, key)
                if value is None:
                    result = self._work()
                    client.set(key, result, px=RETENTION_MS)
                    return result
                if value != IN_PROGRESS:
                    return value
                time.sleep(interval)
            raise AssertionError("unreachable")

        return request


def _begin_by_watch(client: Redis, key: str) -> object:
    """Returns the value of `key`; None if it had none, so that this client does the work."""
    with client.pipeline() as pipe:
        while True:
            try:
                pipe.watch(key)
                value = pipe.get(key)
                if value is not None:
                    return value
                pipe.multi()
                pipe.set(key, IN_PROGRESS, px=60_000)
                pipe.execute()
                return None
            except WatchError:
                continue


def _poll_intervals() -> Iterator[float]:
    interval = FIRST_POLL
    while True:
        yield interval
        interval = min(interval * 1.5, LONGEST_POLL)
