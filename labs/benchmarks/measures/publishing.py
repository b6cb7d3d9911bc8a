"""The duration of publishing."""

from __future__ import annotations

from labs.benchmarks.environments import (
    DEDUPE,
    WITH_CONTROL_AND_DEDUPE,
    cost_of,
    ratio_figures,
    server_for,
    start_environments,
)
from labs.benchmarks.figure import MeasureResult
from labs.benchmarks.interleaving import Call, interleave
from labs.benchmarks.measure import Measure
from labs.comparison.contestants import OURS
from labs.comparison.environment import Environment

GOALS = {OURS.name: 1.05, DEDUPE: 1.30}


class Publishing(Measure):
    """``delay`` of a no-op task, each call with a different argument; no worker runs."""

    name = "publish"
    title = "publish"

    ROUNDS, EACH = 80, 20

    entries = WITH_CONTROL_AND_DEDUPE

    def measure(self) -> MeasureResult:
        with (
            server_for(self.entries) as server,
            start_environments(server, self.entries, concurrency=0) as environments,
        ):
            calls = {name: _publishing(environment) for name, environment in environments.items()}
            times = interleave(calls, self.ROUNDS, self.EACH)
        return MeasureResult(ratio_figures(times, GOALS), [cost_of("publish", "µs", times)])


def _publishing(environment: Environment) -> Call:
    publish = environment.task("no_op").delay
    return lambda: publish(environment.order())
