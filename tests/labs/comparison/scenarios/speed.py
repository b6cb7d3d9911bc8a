"""What it costs. Contestants take turns, so that all of them see the machine as it is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles

from tests.labs.comparison.contestants import CONTESTANTS, OURS, PLAIN
from tests.labs.comparison.environment import Environment
from tests.labs.comparison.scenario import Cell, Race, Times
from tests.waiting import SOON

#: Plain Celery once more: how far it is from itself tells what the figures are worth.
AGAIN = "celery again"
DEDUPE = "celery-idempotent with dedupe_publish"
#: Who runs in both races.
ENTRIES = {**{each.name: (each.name, {}) for each in CONTESTANTS}, AGAIN: (PLAIN.name, {})}

#: Calls of each entry before the clock is looked at, and calls in one turn.
WARM_UP, TURN = 20, 5


class Publishing(Race):
    """Publish 1000 no-ops, each with an argument of its own; there is no worker."""

    name = "publish"
    title = "publish, ratio to plain (1000 no-ops)"
    asked = "≤ 1.05 (1.30 with dedupe_publish)"
    given = {"concurrency": 0}
    entries = {
        **ENTRIES,
        DEDUPE: (OURS.name, {"task_options": {"idempotency_dedupe_publish": True}}),
    }

    CALLS = 1000
    AT_MOST, AT_MOST_WITH_DEDUPE = 1.05, 1.30

    def run(self, arenas: Mapping[str, Environment]) -> Times:
        return take_turns(
            {e: environment.task("no_op").delay for e, environment in arenas.items()}, self.CALLS
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
            not ours.broken
            and ours.facts["ratio"] <= self.AT_MOST
            and ours.facts["ratio with dedupe_publish"] <= self.AT_MOST_WITH_DEDUPE
        )


class EndToEnd(Race):
    """Publish a no-op, await its result, and so on; each worker has one process."""

    name = "live"
    title = "live end to end, ratio to plain"
    asked = "≤ 1.10"
    given = {"concurrency": 1}
    entries = ENTRIES
    heats = 5

    CALLS = 100
    AT_MOST = 1.10

    def run(self, arenas: Mapping[str, Environment]) -> Times:
        return take_turns(
            {e: _round_trip(environment) for e, environment in arenas.items()}, self.CALLS
        )

    def measure(self, times: Times) -> dict[str, Cell]:
        return compared(times)

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        ours = cells[OURS.name]
        return not ours.broken and ours.facts["ratio"] <= self.AT_MOST


def _round_trip(environment: Environment) -> Callable[[str], object]:
    publish = environment.task("no_op").delay
    return lambda order: publish(order).get(timeout=SOON)


def take_turns(calls: Mapping[str, Callable[[str], object]], number: int) -> Times:
    """Time `number` calls of each entry; who comes after whom is left to chance."""
    times: dict[str, list[float]] = {entry: [] for entry in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call(Environment.order())
    for _ in range(number // TURN):
        for entry in random.sample(list(calls), len(calls)):
            for order in [Environment.order() for _ in range(TURN)]:
                began_at = time.perf_counter()
                calls[entry](order)
                times[entry].append(time.perf_counter() - began_at)
    return times


def ratio(times: Times, entry: str) -> float:
    """The median of `entry`, with plain Celery's as the unit."""
    return round(median(times[entry]) / _unit(times), 3)


def compared(times: Times) -> dict[str, Cell]:
    """The cells of the contestants."""
    cells = {}
    for contestant in CONTESTANTS:
        low, _, high = (each / _unit(times) for each in quantiles(times[contestant.name], n=4))
        facts = {
            "ratio": ratio(times, contestant.name),
            "middle half": [round(low, 2), round(high, 2)],
            "median in ms": round(median(times[contestant.name]) * 1000, 3),
        }
        text = f"{facts['ratio']:.2f} ({low:.2f}–{high:.2f})"
        cells[contestant.name] = Cell(text, facts)
    return {**cells, PLAIN.name: _plain(times, cells[PLAIN.name])}


def _plain(times: Times, cell: Cell) -> Cell:
    pair = [median(times[entry]) for entry in (PLAIN.name, AGAIN)]
    apart = max(pair) / min(pair) - 1
    facts = {**cell.facts, "ratio": 1, "two plain ones apart": round(apart, 3)}
    return Cell(f"1 = {_unit(times) * 1000:.2f} ms ± {apart:.0%}", facts)


def _unit(times: Times) -> float:
    return median([*times[PLAIN.name], *times[AGAIN]])
