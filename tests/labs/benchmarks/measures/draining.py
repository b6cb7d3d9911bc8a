"""How fast a worker drains a queue: where Celery itself is the limit."""

from __future__ import annotations

import time

from tests.labs.benchmarks.figure import Bars, Figure, Finding, Spread
from tests.labs.benchmarks.live import ENTRIES, arenas, server_for
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Rounds, in_turn
from tests.labs.comparison.contestants import OURS
from tests.labs.comparison.environment import Arena
from tests.waiting import eventually


class Draining(Measure):
    """No-op tasks that one worker process gets through in a second, from a full queue.

    The worker is frozen while the queue is filled. Results are stored, nobody waits for them.
    """

    name = "drain"
    title = "a worker process drains a queue"
    page = "scaling"

    ROUNDS, TASKS = 6, 300

    entries = ENTRIES

    def measure(self, show: Show) -> Finding:
        rates: Rounds = {name: [] for name in self.entries}
        with server_for(self.entries) as server, arenas(server, self.entries) as field:
            for environment in field.values():
                _drain(environment, self.TASKS // 10)
            for number in range(self.ROUNDS):
                for name in in_turn(rates, number):
                    rates[name].append(_drain(field[name], self.TASKS))
                show((number + 1) / self.ROUNDS)
        spreads = {name: Spread.of(each) for name, each in rates.items()}
        return Finding(
            [Figure.spread_of(name, each, "tasks/s") for name, each in spreads.items()],
            [
                Bars(
                    "No-op tasks that one worker process gets through",
                    "tasks/s",
                    spreads,
                    (OURS.name,),
                )
            ],
            {"tasks a second": rates},
        )


def _drain(environment: Arena, tasks: int) -> float:
    with environment.frozen():
        for _ in range(tasks):
            environment.publish("no_op", environment.order())
        began_at = time.perf_counter()
    eventually(lambda: not environment.messages(), "the queue is drained")
    return tasks / (time.perf_counter() - began_at)
