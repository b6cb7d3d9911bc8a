"""What celery-idempotent adds to the cost of a task."""

from __future__ import annotations

from labs.benchmarks.environments import UNFUSED, plain
from labs.benchmarks.figure import Cost, Spread
from labs.benchmarks.interleaving import Rounds
from labs.comparison.contestants import OURS


def cost_of(label: str, unit: str, rounds: Rounds) -> Cost:
    """Returns a line of the table of costs from the values of each round, by contestant."""
    ours, of_celery = rounds[OURS.name], plain(rounds)
    return Cost(
        label,
        unit,
        Spread.from_values(of_celery).median,
        Spread.from_values(ours).median,
        Spread.from_values([more - less for more, less in zip(ours, of_celery, strict=True)]),
        Spread.from_values(rounds[UNFUSED]).median if UNFUSED in rounds else None,
    )


def exact_cost(
    label: str, unit: str, celery: float, ours: float, unfused: float | None = None
) -> Cost:
    """Returns a line of the table of costs from counts."""
    return Cost(label, unit, celery, ours, Spread.from_values([ours - celery]), unfused)
