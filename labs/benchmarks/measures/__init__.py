"""All measures, in the order of the page."""

from __future__ import annotations

from labs.benchmarks.measure import Measure
from labs.benchmarks.measures.draining import QueueDrain
from labs.benchmarks.measures.end_to_end import EndToEnd
from labs.benchmarks.measures.memory import Memory
from labs.benchmarks.measures.publishing import Publishing
from labs.benchmarks.measures.soak import Soak
from labs.benchmarks.measures.waking import Waking

MEASURES: tuple[Measure, ...] = (
    *(Memory(), QueueDrain(), EndToEnd(), Publishing(), Soak(), Waking()),
)


def find_measure(name: str) -> Measure:
    """Returns the measure of that name."""
    return next(measure for measure in MEASURES if measure.name == name)
