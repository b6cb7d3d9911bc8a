"""The duration of a task from its publication to its result."""

from __future__ import annotations

from tests.labs.benchmarks.environments import (
    WITH_CONTROL,
    ratio_figures,
    relative_to_celery,
    server_for,
    start_environments,
)
from tests.labs.benchmarks.figure import Bars, Figure, Goal, MeasureResult, Spread
from tests.labs.benchmarks.interleaving import Call, Rounds, interleave
from tests.labs.benchmarks.measure import Measure, ProgressCallback
from tests.labs.comparison.contestants import CONTESTANTS, OURS, PLAIN
from tests.labs.comparison.environment import Environment
from tests.waiting import SOON

GOALS = {OURS.name: Goal(1.08)}
PEERS = [each.name for each in CONTESTANTS if each not in (OURS, PLAIN)]


class EndToEnd(Measure):
    """Publishes a no-op task and waits for its result, repeatedly; each worker has one process.

    Workers are restarted several times, because processes of the same program differ in speed.
    """

    name = "live"
    title = "no-op task, from publish to result"
    timeout = 240.0

    RESTARTS, ROUNDS, EACH = 5, 30, 6

    entries = WITH_CONTROL

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        times: Rounds = {name: [] for name in self.entries}
        with server_for(self.entries) as server:
            for restart in range(self.RESTARTS):
                with start_environments(server, self.entries) as environments:
                    calls = {
                        name: _round_trip(environment) for name, environment in environments.items()
                    }
                    for name, each in interleave(
                        calls, self.ROUNDS, self.EACH,
                        lambda share, before=restart: progress((before + share) / self.RESTARTS),
                    ).items():  # fmt: skip
                        times[name] += each
        peer_ratios = [
            Figure.from_spread(
                f"{OURS.name} / {peer}",
                Spread.from_ratios(times[OURS.name], times[peer]),
                "×",
                Goal(1, "<"),
            )
            for peer in PEERS
            if peer in times
        ]
        return MeasureResult(
            ratio_figures(times, GOALS) + peer_ratios,
            [
                Bars(
                    "From publish to result, plain Celery = 1",
                    "×",
                    relative_to_celery(times),
                    (OURS.name,),
                )
            ],
            {"medians of rounds, µs": times},
        )


def _round_trip(environment: Environment) -> Call:
    publish = environment.task("no_op").delay
    return lambda: publish(environment.order()).get(timeout=SOON)
