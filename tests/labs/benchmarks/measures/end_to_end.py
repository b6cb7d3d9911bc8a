"""What a whole task takes, live."""

from __future__ import annotations

from tests.labs.benchmarks.figure import Bars, Figure, Finding, Goal, Spread
from tests.labs.benchmarks.live import ENTRIES, arenas, in_units_of_plain, ratios, server_for
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Call, Rounds, take_turns
from tests.labs.comparison.contestants import CONTESTANTS, OURS, PLAIN
from tests.labs.comparison.environment import Arena
from tests.waiting import SOON

GOALS = {OURS.name: Goal(1.08)}
PEERS = [each.name for each in CONTESTANTS if each not in (OURS, PLAIN)]


class EndToEnd(Measure):
    """Publish a no-op, wait for its result, and so on; each worker has one process.

    In several heats, each with new workers: one process is a little faster than another.
    """

    name = "live"
    title = "live end to end, no-op task"
    timeout = 240.0

    HEATS, ROUNDS, EACH = 5, 30, 6

    entries = ENTRIES

    def measure(self, show: Show) -> Finding:
        times: Rounds = {name: [] for name in self.entries}
        with server_for(self.entries) as server:
            for heat in range(self.HEATS):
                with arenas(server, self.entries) as field:
                    calls = {name: _round_trip(environment) for name, environment in field.items()}
                    for name, each in take_turns(
                        calls, self.ROUNDS, self.EACH,
                        lambda done, at=heat: show((at + done) / self.HEATS),
                    ).items():  # fmt: skip
                        times[name] += each
        below = [
            Figure.spread_of(
                f"{OURS.name} / {peer}",
                Spread.of_ratios(times[OURS.name], times[peer]),
                "×",
                Goal(1, "<"),
            )
            for peer in PEERS
            if peer in times
        ]
        return Finding(
            ratios(times, GOALS) + below,
            [
                Bars(
                    "Live end to end, plain Celery = 1", "×", in_units_of_plain(times), (OURS.name,)
                )
            ],
            {"medians of rounds, µs": times},
        )


def _round_trip(environment: Arena) -> Call:
    publish = environment.task("no_op").delay
    return lambda: publish(environment.order()).get(timeout=SOON)
