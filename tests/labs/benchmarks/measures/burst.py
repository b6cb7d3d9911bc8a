"""Many clients, one key: one script against WATCH, MULTI and EXEC."""

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
from celery_idempotent.testing.server import RedisServer
from tests.labs.benchmarks.bench import RETENTION_MS, own_server, result_of
from tests.labs.benchmarks.figure import Bars, Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Rounds, in_turn

GATE, WATCH = "celery-idempotent", "WATCH, MULTI, EXEC"

#: One request for a key; gives the result.
Request = Callable[[str], object]

#: Seconds between two looks of who waits behind WATCH, where nobody tells him: rarer each time.
FIRST_LOOK, LAST_LOOK = 0.02, 0.2

RESULT = result_of(100).body.decode()
IN_PROGRESS = b"in progress"


class Burst(Measure):
    """200 clients, each with 10 requests in a row for one and the same key; the work takes 50 ms.

    Whoever comes while it is done waits: by the gate until he hears of the outcome, behind WATCH
    until he looks again. The clients are threads of one process, so that is the limit, not Redis.
    """

    name = "burst"
    title = "200 clients × 10 requests on one key, 50 ms of work"

    CLIENTS, REQUESTS, ROUNDS = 200, 10, 9
    WORK = 0.05

    def measure(self, show: Show) -> Finding:
        rates: Rounds = {GATE: [], WATCH: []}
        slowest: Rounds = {GATE: [], WATCH: []}
        with own_server(maxclients="2000") as server:
            requests = {GATE: self._gated(server), WATCH: self._watched(server)}
            keys = count()
            with ThreadPoolExecutor(self.CLIENTS) as pool:
                for number in range(-1, self.ROUNDS):  # the first one connects
                    for name in in_turn(requests, max(number, 0)):
                        rate, p99 = self._round(pool, requests[name], f"key-{next(keys)}")
                        if number >= 0:
                            rates[name].append(rate)
                            slowest[name].append(p99)
                    show((number + 1) / self.ROUNDS)
        return Finding(
            [
                Figure.spread_of("throughput, ours / WATCH",
                                 Spread.of_ratios(rates[GATE], rates[WATCH]), "×", Goal(2.3, "≥")),
                Figure.spread_of("p99, ours / WATCH",
                                 Spread.of_ratios(slowest[GATE], slowest[WATCH]), "×", Goal(0.36)),
                *(Figure.spread_of(f"{name}, throughput", Spread.of(each), "requests/s")
                  for name, each in rates.items()),
                *(Figure.spread_of(f"{name}, p99", Spread.of(each), "ms")
                  for name, each in slowest.items()),
            ],
            [Bars("p99 of 200 clients on one key", "ms",
                  {name: Spread.of(each) for name, each in slowest.items()}, (GATE,))],
            {"requests a second": rates, "p99, ms": slowest},
        )  # fmt: skip

    def _round(self, pool: ThreadPoolExecutor, request: Request, key: str) -> tuple[float, float]:
        """Requests a second, and the p99 of one in milliseconds."""
        ready = threading.Barrier(self.CLIENTS + 1)

        def client() -> list[float]:
            ready.wait()
            taken = []
            for _ in range(self.REQUESTS):
                began_at = time.perf_counter()
                request(key)
                taken.append(time.perf_counter() - began_at)
            return taken

        clients = [pool.submit(client) for _ in range(self.CLIENTS)]
        ready.wait()
        began_at = time.perf_counter()
        taken = [seconds for each in clients for seconds in each.result()]
        rate = len(taken) / (time.perf_counter() - began_at)
        return rate, 1000 * quantiles(taken, n=100)[98]

    def _work(self) -> str:
        time.sleep(self.WORK)
        return RESULT

    def _gated(self, server: RedisServer) -> Request:
        idem = Idempotency(server.url, on_conflict="wait", wait_timeout=60)
        return idem.idempotent(lambda key: self._work(), name="shop.charge")

    def _watched(self, server: RedisServer) -> Request:
        client = server.client(max_connections=2 * self.CLIENTS)

        def request(key: str) -> object:
            for pause in _pauses():
                there = _begin_by_watch(client, key)
                if there is None:
                    result = self._work()
                    client.set(key, result, px=RETENTION_MS)
                    return result
                if there != IN_PROGRESS:
                    return there
                time.sleep(pause)
            raise AssertionError("unreachable")

        return request


def _begin_by_watch(client: Redis, key: str) -> object:
    """What is under `key`; None where nothing was, and this caller is to do the work."""
    with client.pipeline() as pipe:
        while True:
            try:
                pipe.watch(key)
                there = pipe.get(key)
                if there is not None:
                    return there
                pipe.multi()
                pipe.set(key, IN_PROGRESS, px=60_000)
                pipe.execute()
                return None
            except WatchError:
                continue


def _pauses() -> Iterator[float]:
    """Between the looks of one who waits."""
    pause = FIRST_LOOK
    while True:
        yield pause
        pause = min(pause * 1.5, LAST_LOOK)
