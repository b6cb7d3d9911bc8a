"""The duration of a task inside a process of the pool."""

from __future__ import annotations

from labs.benchmarks.costs import cost_of
from labs.benchmarks.environments import (
    CELERY_AND_OURS,
    difference_figures,
    plain,
    ratio_figures,
    relative_to_celery,
)
from labs.benchmarks.figure import Bars, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.traced_calls import interleave_calls, start_traced_calls
from labs.comparison.contestants import OURS

REPLAY = f"replay by {OURS.name}"
GOALS = {OURS.name: Goal(1.25)}


class TracedCall(Measure):
    """The duration of a no-op task from its message to its stored result, without the broker.

    Celery's tracer, the function that a process of the pool calls, is called in this process.
    """

    name = "trace"
    title = "no-op task inside the pool"

    ROUNDS, EACH = 60, 40

    entries = CELERY_AND_OURS

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with start_traced_calls(self.entries, replay=OURS.name) as calls:
            times = interleave_calls(calls, self.ROUNDS, self.EACH, progress)
        return MeasureResult(
            [
                *ratio_figures(times, GOALS),
                *difference_figures(times, (REPLAY,)),
                Figure.from_spread("celery, absolute", Spread.from_values(plain(times)), "µs"),
            ],
            [
                Bars(
                    "A no-op task inside the pool, plain Celery = 1",
                    "×",
                    relative_to_celery(times),
                    (OURS.name, REPLAY),
                )
            ],
            {"medians of rounds, µs": times},
            [cost_of("time inside the pool", "µs", times)],
        )
