"""Commands that a task costs Redis."""

from __future__ import annotations

from tests.labs.benchmarks.figure import Figure, Finding, Goal
from tests.labs.benchmarks.listener import Ear
from tests.labs.benchmarks.live import ALONE, arenas, server_for
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.comparison.contestants import OURS, PLAIN
from tests.labs.comparison.environment import Arena
from tests.waiting import SOON


class Commands(Measure):
    """What broker, backend and records are sent for one no-op task that is waited for.

    All three are on one server, which tells by MONITOR. Commands that a script runs inside the
    server are not counted: nobody waits for them on a wire, and the server's time has them.
    """

    name = "commands"
    title = "Redis commands of a task"
    counts = True

    TASKS = 100

    entries = ALONE

    def measure(self, show: Show) -> Finding:
        counts: dict[str, dict[str, int]] = {}
        with server_for(self.entries) as server, arenas(server, self.entries) as field:
            for number, (name, environment) in enumerate(field.items()):
                _work(environment, self.TASKS // 10)
                with Ear(server) as ear:
                    _work(environment, self.TASKS)
                counts[name] = dict(ear.commands.most_common())
                show((number + 1) / len(field))
        # What the clock makes them send, such as polls of an empty queue, is rounded away.
        a_task = {
            name: {command: round(sent / self.TASKS) for command, sent in of.items()}
            for name, of in counts.items()
        }
        sums = {name: sum(of.values()) for name, of in a_task.items()}
        extra = sums[OURS.name] - sums[PLAIN.name]
        return Finding(
            [
                Figure(f"{OURS.name}, more than {PLAIN.name}", extra, goal=Goal(2)),
                *(Figure(name, count) for name, count in sums.items()),
            ],
            raw={"commands": counts, "tasks": self.TASKS},
        )


def _work(environment: Arena, tasks: int) -> None:
    publish = environment.task("no_op").delay
    for _ in range(tasks):
        publish(environment.order()).get(timeout=SOON)
