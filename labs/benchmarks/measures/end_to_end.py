"""The duration of a task from its publication to its result."""

from __future__ import annotations

from labs.benchmarks.environments import (
    WITH_UNFUSED,
    cost_of,
    ratio_figures,
    server_for,
    start_environments,
)
from labs.benchmarks.figure import MeasureResult
from labs.benchmarks.interleaving import Call, Rounds, interleave
from labs.benchmarks.measure import Measure
from labs.comparison.contestants import OURS
from labs.comparison.environment import Environment
from tests.waiting import SOON

REPLAY = f"replay by {OURS.name}"
GOALS = {OURS.name: 1.05}


class EndToEnd(Measure):
    """Publishes a no-op task and waits for its result, repeatedly; each worker has one process.

    A replay is a duplicate of a call that is completed.

    Workers are restarted several times, because processes of the same program differ in speed.
    """

    name = "live"
    title = "no-op task, from publish to result"
    timeout = 300.0

    RESTARTS, ROUNDS, EACH = 5, 30, 6

    entries = WITH_UNFUSED

    def measure(self) -> MeasureResult:
        times: Rounds = {}
        with server_for(self.entries) as server:
            for _ in range(self.RESTARTS):
                with start_environments(server, self.entries) as environments:
                    calls = {
                        name: _round_trip(environment) for name, environment in environments.items()
                    }
                    calls[REPLAY] = _round_trip(environments[OURS.name], "replayed")
                    for name, each in interleave(calls, self.ROUNDS, self.EACH).items():
                        times.setdefault(name, []).extend(each)
        return MeasureResult(
            ratio_figures(times, GOALS),
            costs=[
                cost_of(
                    "from publish to result, idle worker",
                    "ms",
                    {name: [each / 1000 for each in times[name]] for name in times},
                )
            ],
        )


def _round_trip(environment: Environment, order: str = "") -> Call:
    publish = environment.task("no_op").delay
    return lambda: publish(order or environment.order()).get(timeout=SOON)
