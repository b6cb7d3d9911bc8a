"""What grows in a worker that is busy for long."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from labs.benchmarks.bench import private_server
from labs.benchmarks.environments import OURS_BY_DEFAULT, Entries, start_environments
from labs.benchmarks.figure import Figure, Goal, MeasureResult
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.usage import processes_of_group
from labs.comparison.contestants import OURS
from labs.comparison.environment import Environment
from tests.servers.redis_server import RedisServer

#: Seconds for which results and records are kept, so that their number does not grow.
RETENTION = 20
#: Messages in the queue, so that it is never empty.
BACKLOG = 400
#: Of the calls, every so many is a duplicate.
DUPLICATES = 4

MB = 1_000_000


class Sample(NamedTuple):
    """The state of a worker, its main process and its pool, and of Redis."""

    memory: float
    largest: float
    descriptors: int
    threads: int
    connections: int
    redis_memory: float


LIMITS = {
    "memory": ("resident memory of the worker", MB, "MB", Goal(1)),
    "largest": ("resident memory of its largest process", MB, "MB", Goal(1)),
    "descriptors": ("file descriptors of the worker", 1, "", Goal(0)),
    "threads": ("threads of the worker", 1, "", Goal(0)),
    "connections": ("connections to Redis", 1, "", Goal(0)),
    "redis_memory": ("memory of Redis", MB, "MB", Goal(1)),
}


class Soak(Measure):
    """Two processes drain a queue at full speed, every fourth call a duplicate.

    Results and records are kept for 20 seconds, so that Redis should not grow either. Growth is the
    difference between the medians of the second and the last quarter of the time.
    """

    name = "soak"
    title = "ten minutes at full speed"
    section = "soak"
    timeout = 1200.0

    MINUTES = 10.0
    SAMPLES = 60

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with (
            private_server() as server,
            start_environments(server, _entries(), concurrency=2) as environments,
        ):
            environment = environments[OURS.name]
            started_at = time.monotonic()
            published = _Published(environment)
            samples = []
            for number in range(self.SAMPLES):
                published.keep_up_until(
                    started_at + 60 * self.MINUTES * (number + 1) / self.SAMPLES
                )
                samples.append(_sample(environment, server))
                progress((number + 1) / self.SAMPLES)
        seconds = time.monotonic() - started_at
        quarter = len(samples) // 4
        second, last = samples[quarter : 2 * quarter], samples[-quarter:]
        figures = [
            Figure("calls", published.number),
            Figure("calls per second", published.number / seconds),
        ]
        for field, (label, divisor, unit, goal) in LIMITS.items():
            before, after = (
                median(getattr(sample, field) for sample in part) / divisor
                for part in (second, last)
            )
            figures += [
                Figure(f"{label}, growth", after - before, unit, goal),
                Figure(f"{label}, at the end", after, unit),
            ]
        return MeasureResult(figures, raw={"samples": [each._asdict() for each in samples]})


class _Published:
    """Keeps the queue of a worker from running empty."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.number = 0

    def keep_up_until(self, deadline: float) -> None:
        """Publishes until that time of the monotonic clock."""
        while time.monotonic() < deadline:
            if self._environment.messages() >= BACKLOG:
                time.sleep(0.02)
                continue
            for _ in range(BACKLOG // 4):
                is_duplicate = self.number % DUPLICATES == 0
                order = "duplicate" if is_duplicate else self._environment.order()
                self._environment.publish("no_op", order)
                self.number += 1


def _sample(environment: Environment, server: RedisServer) -> Sample:
    processes = list(processes_of_group(environment.worker_pid))
    with server.client() as client:
        return Sample(
            sum(each.memory for each in processes),
            max(each.memory for each in processes),
            sum(each.descriptors for each in processes),
            sum(each.threads for each in processes),
            client.info("clients")["connected_clients"],
            client.info("memory")["used_memory"],
        )


def _entries() -> Entries:
    name, options = OURS_BY_DEFAULT[OURS.name]
    settings = {"result_expires": RETENTION, "idempotency_result_ttl": RETENTION}
    return {OURS.name: (name, {"settings": {**options["settings"], **settings}})}
