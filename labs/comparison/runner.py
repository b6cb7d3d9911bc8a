"""Runs scenarios: several at a time, but those that compare durations one at a time."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import count

from labs.comparison.contestants import CONTESTANTS
from labs.comparison.environment import Environment
from labs.comparison.scenarios import Cell, Scenario, find_scenario

#: Each process mostly waits, but starts a worker.
PROCESSES = 8

#: By scenario and contestant.
Cells = Mapping[str, Mapping[str, Cell]]


def run(scenarios: Sequence[Scenario], url: str) -> Cells:
    """Returns the cells; prints a failure when it happens."""
    cells: dict[str, dict[str, Cell]] = defaultdict(dict)
    numbers = count()
    together = [scenario for scenario in scenarios if not scenario.is_timed]
    batches = [together, *([scenario] for scenario in scenarios if scenario.is_timed)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        for batch in batches:
            futures: dict[Future[Cell], tuple[str, str]] = {}
            for scenario in batch:
                for contestant in CONTESTANTS:
                    cell = scenario.name, contestant.name
                    futures[processes.submit(measure, *cell, url, next(numbers))] = cell
            for future in as_completed(futures):
                name, contestant_name = futures[future]
                cell = cells[name][contestant_name] = future.result()
                text = f"{name}, {contestant_name}: {cell.failure or cell.text}"
                print(text, file=sys.stderr, flush=True)
    return cells


def measure(scenario_name: str, contestant: str, url: str, number: int) -> Cell:
    """Runs a scenario with a contestant; called in a process of the pool."""
    scenario = find_scenario(scenario_name)
    with Environment(contestant, url, number, **scenario.options) as environment:
        try:
            return scenario.measure(environment)
        except Exception as error:
            failure = f"{traceback.format_exc()}\n{environment.log()[-3000:]}"
            return Cell(f"failed: {error}".splitlines()[0], failure=failure)
