"""What publishing takes."""

from __future__ import annotations

from tests.labs.benchmarks.figure import Bars, Finding, Goal
from tests.labs.benchmarks.live import (
    DEDUPE,
    WITH_DEDUPE,
    arenas,
    in_units_of_plain,
    ratios,
    server_for,
)
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Call, take_turns
from tests.labs.comparison.contestants import OURS
from tests.labs.comparison.environment import Arena

GOALS = {OURS.name: Goal(1.05), DEDUPE: Goal(1.30)}


class Publishing(Measure):
    """``delay`` of a no-op, each with an argument of its own; there is no worker."""

    name = "publish"
    title = "publish"

    ROUNDS, EACH = 80, 20

    entries = WITH_DEDUPE

    def measure(self, show: Show) -> Finding:
        with (
            server_for(self.entries) as server,
            arenas(server, self.entries, concurrency=0) as field,
        ):
            calls = {name: _publishing(environment) for name, environment in field.items()}
            times = take_turns(calls, self.ROUNDS, self.EACH, show)
        return Finding(
            ratios(times, GOALS),
            [
                Bars(
                    "Publishing, plain Celery = 1",
                    "×",
                    in_units_of_plain(times),
                    (OURS.name, DEDUPE),
                )
            ],
            {"medians of rounds, µs": times},
        )


def _publishing(environment: Arena) -> Call:
    publish = environment.task("no_op").delay
    return lambda: publish(environment.order())
