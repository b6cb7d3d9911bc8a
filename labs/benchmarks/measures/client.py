"""Durations of single calls by one client."""

from __future__ import annotations

from labs.benchmarks import contestants as names
from labs.benchmarks.bench import Bench, private_server
from labs.benchmarks.figure import Bars, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds, interleave
from labs.benchmarks.measure import Measure, ProgressCallback


class SingleClient(Measure):
    """The duration of a run and of a replay, compared with lower bounds and other libraries.

    The lower bound is the same number of round trips with a script that does nothing and takes no
    arguments, by the same client: the store's transport, which is faster than redis-py's client.
    The arguments of a run, sent to scripts that do nothing, divide the difference between a run
    and its lower bound into the client's part and the server's. Powertools and an idempotent
    function also derive a key and call a function.
    """

    name = "client"
    title = "one client, p50"

    ROUNDS, EACH = 60, 60
    RUNS = (
        names.RUN,
        names.TWO_NO_OPS,
        names.RUN_NO_OP,
        names.CLIENT_TWO_NO_OPS,
        names.BY_CLIENT,
        names.FUNCTION,
        names.LOCK,
        names.PYTHON_REDIS_LOCK,
        names.POWERTOOLS,
    )
    REPLAYS = (
        *(names.REPLAY, names.ONE_NO_OP, names.CLIENT_ONE_NO_OP),
        *(names.FUNCTION_REPLAY, names.POWERTOOLS_REPLAY),
    )

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with private_server() as server:
            times = interleave(names.contestants(Bench(server)), self.ROUNDS, self.EACH, progress)
        return MeasureResult(
            [
                _ratio(times, names.RUN, names.TWO_NO_OPS, Goal(1.25)),
                _ratio(times, names.RUN, names.LOCK, Goal(0.8)),
                _ratio(times, names.REPLAY, names.ONE_NO_OP, Goal(1.25)),
                _ratio(times, names.BY_CLIENT, names.CLIENT_TWO_NO_OPS),
                _ratio(times, names.RUN, names.CLIENT_TWO_NO_OPS),
                _ratio(times, names.REPLAY, names.CLIENT_ONE_NO_OP),
                _ratio(times, names.RUN, names.BY_CLIENT),
                *(
                    Figure.from_spread(name, Spread.from_values(each), "µs")
                    for name, each in times.items()
                ),
            ],
            [
                _bars("A run, one client", times, self.RUNS, (names.RUN, names.FUNCTION)),
                _bars(
                    "A replay, one client",
                    times,
                    self.REPLAYS,
                    (names.REPLAY, names.FUNCTION_REPLAY),
                ),
            ],
            {"medians of rounds, µs": times},
        )


def _ratio(times: Rounds, ours: str, other: str, goal: Goal | None = None) -> Figure:
    spread = Spread.from_ratios(times[ours], times[other])
    return Figure.from_spread(f"{ours} / {other}", spread, "×", goal)


def _bars(title: str, times: Rounds, names: tuple[str, ...], ours: tuple[str, ...]) -> Bars:
    spreads = {name: Spread.from_values(times[name]) for name in names if name in times}
    return Bars(title, "µs", spreads, ours)
