"""Redis commands per task."""

from __future__ import annotations

from collections.abc import Mapping

from labs.benchmarks.command_monitor import CommandMonitor
from labs.benchmarks.costs import exact_cost
from labs.benchmarks.environments import (
    CONTROL,
    UNFUSED,
    WITH_ALL_PEERS,
    server_for,
    start_environments,
)
from labs.benchmarks.figure import Figure, Goal, MeasureResult
from labs.benchmarks.measure import Measure
from labs.comparison.contestants import OURS, PLAIN
from labs.comparison.environment import Environment
from tests.waiting import SOON

WITHOUT_CONTROL = {name: entry for name, entry in WITH_ALL_PEERS.items() if name != CONTROL}


class Commands(Measure):
    """The commands sent to broker, result backend and store for one no-op task and its result.

    All three are on one server, and MONITOR counts the commands. Those that a script runs inside
    the server are not counted: they need no round trip.
    """

    name = "commands"
    title = "Redis commands per task"
    is_exact = True

    TASKS = 100

    entries = WITHOUT_CONTROL

    def measure(self) -> MeasureResult:
        counts: dict[str, Mapping[str, int]] = {}
        with (
            server_for(self.entries) as server,
            start_environments(server, self.entries) as environments,
        ):
            for name, environment in environments.items():
                _work(environment, self.TASKS // 10)
                with CommandMonitor(server) as monitor:
                    _work(environment, self.TASKS)
                counts[name] = monitor.commands
        # Rounding drops periodic commands, such as polls of an empty queue.
        sums = {
            name: sum(round(sent / self.TASKS) for sent in commands.values())
            for name, commands in counts.items()
        }
        extra = sums[OURS.name] - sums[PLAIN.name]
        return MeasureResult(
            [
                Figure(f"{OURS.name} − {PLAIN.name}", extra, goal=Goal(2)),
                *(Figure(name, count) for name, count in sums.items()),
            ],
            costs=[
                exact_cost(
                    "commands to broker and Redis, result read",
                    "",
                    sums[PLAIN.name],
                    sums[OURS.name],
                    sums.get(UNFUSED),
                )
            ],
        )


def _work(environment: Environment, tasks: int) -> None:
    publish = environment.task("no_op").delay
    for _ in range(tasks):
        publish(environment.order()).get(timeout=SOON)
