"""One client on the loopback."""

from __future__ import annotations

from tests.labs.benchmarks import contestants as who
from tests.labs.benchmarks.bench import Bench, own_server
from tests.labs.benchmarks.figure import Bars, Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Rounds, take_turns


class OneClient(Measure):
    """How long a run and a replay take a caller, beside what must be paid in any case.

    The floor is the same number of round trips with a script that does nothing and takes no
    arguments, by the same client: the line that the store speaks through, which is leaner than
    redis-py's. Between the floor and the run stands what a run sends, to scripts that do nothing:
    below it is the client's part, above it the server's. Powertools and a gated function derive a
    key, too, and run something.
    """

    name = "client"
    title = "one client, p50"

    ROUNDS, EACH = 60, 60
    RUNS = (
        who.RUN,
        who.FLOOR,
        who.FOR_NOTHING,
        who.CLIENT_FLOOR,
        who.BY_CLIENT,
        who.GATED,
        who.LOCK,
        who.OTHER_LOCK,
        who.POWERTOOLS,
    )
    REPLAYS = (
        *(who.REPLAY, who.FLOOR_ONE, who.CLIENT_FLOOR_ONE),
        *(who.GATED_REPLAY, who.POWERTOOLS_REPLAY),
    )

    def measure(self, show: Show) -> Finding:
        with own_server() as server:
            times = take_turns(who.contestants(Bench(server)), self.ROUNDS, self.EACH, show)
        return Finding(
            [
                _ratio(times, who.RUN, who.FLOOR, Goal(1.25)),
                _ratio(times, who.RUN, who.LOCK, Goal(0.8)),
                _ratio(times, who.REPLAY, who.FLOOR_ONE, Goal(1.25)),
                _ratio(times, who.BY_CLIENT, who.CLIENT_FLOOR),
                _ratio(times, who.RUN, who.CLIENT_FLOOR),
                _ratio(times, who.REPLAY, who.CLIENT_FLOOR_ONE),
                _ratio(times, who.RUN, who.BY_CLIENT),
                *(Figure.spread_of(name, Spread.of(each), "µs") for name, each in times.items()),
            ],
            [
                _bars("A run, one client", times, self.RUNS, (who.RUN, who.GATED)),
                _bars("A replay, one client", times, self.REPLAYS, (who.REPLAY, who.GATED_REPLAY)),
            ],
            {"medians of rounds, µs": times},
        )


def _ratio(times: Rounds, ours: str, other: str, goal: Goal | None = None) -> Figure:
    spread = Spread.of_ratios(times[ours], times[other])
    return Figure.spread_of(f"{ours} / {other}", spread, "×", goal)


def _bars(title: str, times: Rounds, names: tuple[str, ...], ours: tuple[str, ...]) -> Bars:
    spreads = {name: Spread.of(times[name]) for name in names if name in times}
    return Bars(title, "µs", spreads, ours)
