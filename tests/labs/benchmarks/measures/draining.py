"""The throughput of one worker process."""

from __future__ import annotations

import time

from tests.labs.benchmarks.environments import WITH_CONTROL, server_for, start_environments
from tests.labs.benchmarks.figure import Bars, Figure, MeasureResult, Spread
from tests.labs.benchmarks.interleaving import Rounds, round_order
from tests.labs.benchmarks.measure import Measure, ProgressCallback
from tests.labs.comparison.contestants import OURS
from tests.labs.comparison.environment import Environment
from tests.waiting import eventually


class QueueDrain(Measure):
    """No-op tasks per second that one worker process takes from a full queue.

    The worker is paused while the queue is filled. Results are stored and not read.
    """

    name = "drain"
    title = "throughput of one worker process"
    page = "scaling"

    ROUNDS, TASKS = 6, 300

    entries = WITH_CONTROL

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        rates: Rounds = {name: [] for name in self.entries}
        with (
            server_for(self.entries) as server,
            start_environments(server, self.entries) as environments,
        ):
            for environment in environments.values():
                _drain(environment, self.TASKS // 10)
            for number in range(self.ROUNDS):
                for name in round_order(rates, number):
                    rates[name].append(_drain(environments[name], self.TASKS))
                progress((number + 1) / self.ROUNDS)
        spreads = {name: Spread.from_values(each) for name, each in rates.items()}
        return MeasureResult(
            [Figure.from_spread(name, each, "tasks/s") for name, each in spreads.items()],
            [
                Bars(
                    "No-op tasks by one worker process",
                    "tasks/s",
                    spreads,
                    (OURS.name,),
                )
            ],
            {"tasks per second": rates},
        )


def _drain(environment: Environment, tasks: int) -> float:
    with environment.frozen():
        for _ in range(tasks):
            environment.publish("no_op", environment.order())
        started_at = time.perf_counter()
    eventually(lambda: not environment.messages(), "the queue is drained")
    return tasks / (time.perf_counter() - started_at)
