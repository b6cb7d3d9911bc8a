"""The delay, cost and order of messages that wait for the end of another call."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, ClassVar

from celery.result import AsyncResult

from labs.benchmarks.figure import Figure, MeasureResult, Spread
from labs.benchmarks.measure import Measure
from labs.benchmarks.usage import cpu_of_group
from labs.comparison.contestants import OURS
from labs.comparison.environment import DATABASES_EACH, Environment
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

#: Seconds until the results of a measurement are there.
TIMEOUT = 300
ONE_AT_A_TIME = {"idempotency_until": "finished"}
#: Seconds between the publishes of other tasks.
OTHERS_INTERVAL = 0.1


class Waking(Measure):
    """Duplicates are put back during another call, and woken when it ends.

    Each worker has two processes. Delays are differences of `date_done` between the first call and
    its duplicate.
    """

    name = "wake"
    title = "messages that wait for another call"
    section = "waking"
    timeout = 600.0

    #: Calls of one key that run one at a time: number, seconds, workers; goal in seconds.
    SERIES: ClassVar = {(20, 1.0, 1): 21, (20, 1.0, 3): 21, (200, 0.05, 1): 13, (200, 0.05, 3): 13}
    #: Seconds of a call that has one duplicate, and how often it is measured by each worker.
    PAIRS: ClassVar = {3.0: 8, 20.0: 2}
    WORKERS_OF_PAIRS = 4
    DUPLICATES, BURSTS, BURST_SECONDS = 200, 5, 3.0

    def measure(self) -> MeasureResult:
        figures: list[Figure] = []
        with RedisServer.start(config={"databases": "100"}) as server:
            environments = count()
            for series, goal in self.SERIES.items():
                calls, seconds, workers = series
                with _workers(server, next(environments), workers, ONE_AT_A_TIME) as group:
                    total, put_backs, others = _one_at_a_time(group, calls, seconds)
                label = f"{calls} × {seconds:g} s one at a time, {workers} workers"
                figures += [
                    Figure(label, total, "s", goal),
                    Figure(f"{label}: put back, each", put_backs / calls, goal=1.2),
                    Figure.from_spread(
                        f"{label}: other tasks", Spread.from_values(others), "ms", 20
                    ),
                ]
            for seconds, times in self.PAIRS.items():
                with ExitStack() as stack:
                    pairs = [
                        stack.enter_context(_workers(server, next(environments), 1))[0]
                        for _ in range(self.WORKERS_OF_PAIRS)
                    ]
                    delays = [delay for _ in range(times) for delay in _delays(pairs, seconds)]
                figures += _delay_figures(f"duplicate of a call of {seconds:g} s", delays, 20, 100)
            with _workers(server, next(environments), 1) as (environment,):
                delays, cpu = [], []
                for _ in range(self.BURSTS):
                    burst = self._burst(environment)
                    delays += burst[0]
                    cpu.append(burst[1])
            label = f"{self.DUPLICATES} duplicates of a call"
            figures += _delay_figures(label, delays, None, 300)
            figures.append(
                Figure.from_spread(f"{label}: processor time", Spread.from_values(cpu), "s")
            )
        return MeasureResult(figures)

    def _burst(self, environment: Environment) -> tuple[list[float], float]:
        """Returns the delays in milliseconds, and the processor time of the worker."""
        before, order = cpu_of_group(environment.worker_pid), environment.order()
        work = environment.task("work")
        first = work.delay(order, self.BURST_SECONDS)
        environment.ledger.wait_for_run(order)
        duplicates = [work.delay(order, self.BURST_SECONDS) for _ in range(self.DUPLICATES)]
        delays = [_delay(first, each) for each in duplicates]
        return delays, cpu_of_group(environment.worker_pid) - before


@contextmanager
def _workers(
    server: RedisServer, number: int, workers: int, task_options: dict[str, Any] | None = None
) -> Iterator[list[Environment]]:
    """Starts workers with the same databases."""
    settings = {"idempotency_redis_url": None, "worker_prefetch_multiplier": 4}
    assert 1 + (number + 1) * DATABASES_EACH <= 100
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Environment(
                    OURS.name,
                    server.url,
                    number,
                    worker=worker,
                    concurrency=2,
                    settings=settings,
                    task_options=task_options,
                )
            )
            for worker in range(workers)
        ]


def _one_at_a_time(
    group: list[Environment], calls: int, seconds: float
) -> tuple[float, int, list[float]]:
    """Returns the seconds of all calls, how often they were put back, and other tasks' ms."""
    environment = group[0]
    work, no_op, order = environment.task("work"), environment.task("no_op"), environment.order()
    no_op.delay(environment.order()).get(timeout=TIMEOUT)  # connects
    started_at = time.time()
    results = [work.delay(order, seconds) for _ in range(calls)]
    others: list[float] = []
    # The first calls are not measured: meanwhile, all others are put back.
    while not results[calls // 5].ready():
        time.sleep(OTHERS_INTERVAL)
    while not results[-1].ready() or not all(result.ready() for result in results):
        published_at = time.perf_counter()
        no_op.delay(environment.order()).get(timeout=TIMEOUT)
        others.append(1000 * (time.perf_counter() - published_at))
        time.sleep(OTHERS_INTERVAL)
    ended_at = max(_done_at(result) for result in results)
    runs = environment.ledger.runs(order)
    assert len(runs) == calls
    put_backs = sum(len(re.findall("is put back for", each.log())) for each in group)
    return ended_at - started_at, put_backs, others


def _delays(environments: list[Environment], seconds: float) -> list[float]:
    """Runs a call and its duplicate in each environment, at the same time."""
    calls = [(each, each.order()) for each in environments]
    firsts = [each.task("work").delay(order, seconds) for each, order in calls]
    for each, order in calls:
        each.ledger.wait_for_run(order)
    duplicates = [each.task("work").delay(order, seconds) for each, order in calls]
    return [_delay(*pair) for pair in zip(firsts, duplicates, strict=True)]


def _delay(first: AsyncResult, duplicate: AsyncResult) -> float:
    values = first.get(timeout=TIMEOUT), duplicate.get(timeout=TIMEOUT)
    assert values[0] == values[1]
    return 1000 * (_done_at(duplicate) - _done_at(first))


def _done_at(result: AsyncResult) -> float:
    eventually(lambda: result.date_done is not None, "the result has a date")
    return float(result.date_done.timestamp())


def _delay_figures(
    label: str, delays: list[float], median: float | None, p99: float
) -> list[Figure]:
    goal = None if median is None else median
    last = sorted(delays)[int(0.99 * len(delays))]
    return [
        Figure.from_spread(f"{label}: end to result", Spread.from_values(delays), "ms", goal),
        Figure(f"{label}: end to result, p99", last, "ms", goal=p99),
    ]
