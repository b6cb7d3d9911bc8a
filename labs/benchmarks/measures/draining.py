"""The throughput of one process, and what a task costs there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from redis import Redis

from labs.benchmarks.environments import (
    WITH_UNFUSED,
    cost_of,
    ratio_figures,
    server_for,
    start_environments,
)
from labs.benchmarks.figure import MeasureResult
from labs.benchmarks.interleaving import round_order
from labs.benchmarks.measure import Measure
from labs.benchmarks.usage import ServerUsage, cpu_of_group
from labs.comparison.contestants import OURS
from labs.comparison.environment import Environment

REPLAY, REDELIVERY = f"replay by {OURS.name}", f"redelivery to {OURS.name}"
GOALS = {OURS.name: 1.05}
POLL_INTERVAL = 0.005


class Usage(NamedTuple):
    """What one task of a round has used; times in microseconds."""

    duration: float
    worker_cpu: float
    broker_cpu: float
    redis_cpu: float
    #: With Redis, the result backend and the records: not with the broker.
    round_trips: float
    bytes: float


#: The rows of the table of costs: a field of `Usage`, its divisor and unit.
COSTS = {
    "time of a busy process": ("duration", 1000, "ms"),
    "processor time of the worker": ("worker_cpu", 1000, "ms"),
    "processor time of the broker": ("broker_cpu", 1, "µs"),
    "processor time of Redis (results and records)": ("redis_cpu", 1, "µs"),
    "round trips to Redis": ("round_trips", 1, ""),
    "bytes from and to Redis": ("bytes", 1, "bytes"),
}


class QueueDrain(Measure):
    """The time of a no-op task in a worker of one process that drains a full queue.

    Only the worker that is measured runs; the others are paused. A replay is a duplicate with
    another task id, a redelivery a second copy of the same message, both of a call that is
    completed. Results are stored and not read. Broker and result backend are two servers; records
    are in the result backend.
    """

    name = "drain"
    title = "no-op task, from a full queue"
    timeout = 900.0

    RESTARTS, ROUNDS, TASKS = 4, 6, 400

    entries = WITH_UNFUSED

    def measure(self) -> MeasureResult:
        usages: dict[str, list[Usage]] = {}
        with server_for(self.entries) as server, server_for(self.entries) as broker:
            for _ in range(self.RESTARTS):
                with start_environments(server, self.entries, broker=broker.url) as environments:
                    drains = _Drains(environments, server.client(), broker.client())
                    for name in drains.kinds:  # connects, and stores what is replayed
                        drains.drain(name, self.TASKS // 10)
                    for number in range(self.ROUNDS):
                        for name in round_order(drains.kinds, number):
                            usages.setdefault(name, []).append(drains.drain(name, self.TASKS))
        times = {name: [each.duration for each in usages[name]] for name in usages}
        costs = [
            cost_of(
                label,
                unit,
                {
                    name: [getattr(each, field) / divisor for each in usages[name]]
                    for name in usages
                },
            )
            for label, (field, divisor, unit) in COSTS.items()
        ]
        return MeasureResult(ratio_figures(times, GOALS), costs)


class _Drains:
    """Fills the queue of one environment, lets its worker drain it, and measures that."""

    def __init__(self, environments: dict[str, Environment], server: Redis, broker: Redis) -> None:
        self._server, self._broker = server, broker
        ours = environments[OURS.name]
        self.kinds: dict[str, tuple[Environment, Callable[[], object]]] = {
            name: (each, lambda each=each: each.publish("no_op", each.order()))
            for name, each in environments.items()
        }
        self.kinds[REPLAY] = (ours, lambda: ours.publish("no_op", "replayed"))
        self.kinds[REDELIVERY] = (
            ours,
            lambda: ours.publish("no_op", "redelivered", task_id="redelivered"),
        )
        for environment in environments.values():
            environment.signal(signal.SIGSTOP)

    def drain(self, name: str, tasks: int) -> Usage:
        """Returns what each of `tasks` tasks has used."""
        environment, publish = self.kinds[name]
        for _ in range(tasks):
            publish()
        # The paused worker has asked for a message before, and may have one.
        assert environment.messages() >= tasks - 1, f"{name}: not all tasks are published"
        group = environment.worker_pid
        cpu = cpu_of_group(group)
        server, broker = ServerUsage.of(self._server), ServerUsage.of(self._broker)
        started_at = time.perf_counter()
        environment.signal(signal.SIGCONT)
        try:
            while environment.messages():
                time.sleep(POLL_INTERVAL)
            duration = time.perf_counter() - started_at
        finally:
            environment.signal(signal.SIGSTOP)
        server = ServerUsage.of(self._server).since(server)
        broker = ServerUsage.of(self._broker).since(broker)
        return Usage(
            1e6 * duration / tasks,
            1e6 * (cpu_of_group(group) - cpu) / tasks,
            1e6 * broker.cpu / tasks,
            1e6 * server.cpu / tasks,
            server.reads / tasks,
            server.bytes / tasks,
        )
