"""Durations. Calls are interleaved, so that background load affects all contestants alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles

from labs.comparison.contestants import CONTESTANTS, OURS, PLAIN
from labs.comparison.environment import Environment
from labs.comparison.scenario import Cell, InterleavedScenario, Times
from tests.waiting import SOON

#: A second instance of plain Celery: its distance from the first one shows the noise.
CONTROL = "celery (control)"
DEDUPE = "celery-idempotent with dedupe_publish"
ENTRIES = {**{each.name: (each.name, {}) for each in CONTESTANTS}, CONTROL: (PLAIN.name, {})}

#: Calls of each entry before the measurement, and consecutive calls within it.
WARM_UP, CONSECUTIVE = 20, 5


class Publishing(InterleavedScenario):
    """Publishes 1000 no-op tasks, each with a different argument; no worker runs."""

    name = "publish"
    title = "publish a no-op, relative to Celery"
    expected = "≤ 1.05 (1.30 with dedupe_publish)"
    options = {"concurrency": 0}
    entries = {
        **ENTRIES,
        DEDUPE: (OURS.name, {"task_options": {"idempotency_dedupe_publish": True}}),
    }

    CALLS = 1000
    AT_MOST, AT_MOST_WITH_DEDUPE = 1.05, 1.30

    def run(self, environments: Mapping[str, Environment]) -> Times:
        return interleave(
            {e: environment.task("no_op").delay for e, environment in environments.items()},
            self.CALLS,
        )

    def measure(self, times: Times) -> dict[str, Cell]:
        cells = compared(times)
        ours = cells[OURS.name]
        with_dedupe = ratio(times, DEDUPE)
        cells[OURS.name] = Cell(
            f"{ours.text} ({with_dedupe:.2f} with dedupe_publish)",
            ours.facts | {"ratio with dedupe_publish": with_dedupe},
        )
        return cells

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        ours = cells[OURS.name]
        return (
            not ours.failed
            and ours.facts["ratio"] <= self.AT_MOST
            and ours.facts["ratio with dedupe_publish"] <= self.AT_MOST_WITH_DEDUPE
        )


class EndToEnd(InterleavedScenario):
    """Publishes a no-op task and waits for its result, repeatedly; workers have one process."""

    name = "live"
    title = "no-op from publish to result, relative to Celery"
    expected = "≤ 1.10"
    options = {"concurrency": 1}
    entries = ENTRIES
    restarts = 5

    CALLS = 100
    AT_MOST = 1.10

    def run(self, environments: Mapping[str, Environment]) -> Times:
        return interleave(
            {e: _round_trip(environment) for e, environment in environments.items()}, self.CALLS
        )

    def measure(self, times: Times) -> dict[str, Cell]:
        return compared(times)

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        ours = cells[OURS.name]
        return not ours.failed and ours.facts["ratio"] <= self.AT_MOST


def _round_trip(environment: Environment) -> Callable[[str], object]:
    publish = environment.task("no_op").delay
    return lambda order: publish(order).get(timeout=SOON)


def interleave(calls: Mapping[str, Callable[[str], object]], number: int) -> Times:
    """Times `number` calls of each entry, in random order."""
    times: dict[str, list[float]] = {entry: [] for entry in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call(Environment.order())
    for _ in range(number // CONSECUTIVE):
        for entry in random.sample(list(calls), len(calls)):
            for order in [Environment.order() for _ in range(CONSECUTIVE)]:
                started_at = time.perf_counter()
                calls[entry](order)
                times[entry].append(time.perf_counter() - started_at)
    return times


def ratio(times: Times, entry: str) -> float:
    """Returns the median of `entry` divided by that of plain Celery."""
    return round(median(times[entry]) / _unit(times), 3)


def compared(times: Times) -> dict[str, Cell]:
    """Returns the cells of the contestants."""
    cells = {}
    for contestant in CONTESTANTS:
        low, _, high = (each / _unit(times) for each in quantiles(times[contestant.name], n=4))
        facts = {
            "ratio": ratio(times, contestant.name),
            "interquartile range": [round(low, 2), round(high, 2)],
            "median in ms": round(median(times[contestant.name]) * 1000, 3),
        }
        text = f"{facts['ratio']:.2f} ({low:.2f}–{high:.2f})"
        cells[contestant.name] = Cell(text, facts)
    return {**cells, PLAIN.name: _plain(times, cells[PLAIN.name])}


def _plain(times: Times, cell: Cell) -> Cell:
    medians = [median(times[entry]) for entry in (PLAIN.name, CONTROL)]
    noise = max(medians) / min(medians) - 1
    facts = {**cell.facts, "ratio": 1, "difference of both instances": round(noise, 3)}
    return Cell(f"1 = {_unit(times) * 1000:.2f} ms ± {noise:.0%}", facts)


def _unit(times: Times) -> float:
    return median([*times[PLAIN.name], *times[CONTROL]])
