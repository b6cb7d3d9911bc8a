"""Runs scenarios: several at a time, but those that compare durations one at a time."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import count
from typing import Any

from labs.comparison.contestants import CONTESTANTS
from labs.comparison.environment import DATABASES_EACH, Environment
from labs.comparison.scenario import (
    NOT_APPLICABLE,
    Cell,
    IndependentScenario,
    InterleavedScenario,
    Scenario,
)
from labs.comparison.scenarios import find_scenario
from tests.servers.redis_server import RedisServer

#: Each process mostly waits, but starts a worker.
PROCESSES = 8

#: Called at the start and after each cell with the scenario and the cells that it has so far.
Progress = Callable[[Scenario, Mapping[str, Cell]], None]


def run(
    scenarios: Sequence[Scenario], server: RedisServer, progress: Progress
) -> dict[str, dict[str, Cell]]:
    """Returns the cells, by scenario and contestant."""
    cells: dict[str, dict[str, Cell]] = defaultdict(dict)
    numbers = count()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        for batch in _batches(scenarios):
            futures: dict[Future[dict[str, Cell]], Scenario] = {}
            for scenario in batch:
                progress(scenario, {})
                for future in _submit(scenario, server.url, numbers, processes):
                    futures[future] = scenario
                cells[scenario.name] |= _not_applicable(scenario)
            for future in as_completed(futures):
                scenario = futures[future]
                cells[scenario.name] |= future.result()
                progress(scenario, cells[scenario.name])
    return cells


def databases(scenarios: Sequence[Scenario]) -> int:
    """Returns the number of databases that the server must have."""
    environments = sum(
        len(scenario.entries) * scenario.restarts
        if isinstance(scenario, InterleavedScenario)
        else len(CONTESTANTS)
        for scenario in scenarios
    )
    return 1 + environments * DATABASES_EACH


def _batches(scenarios: Sequence[Scenario]) -> Iterator[list[Scenario]]:
    """Yields scenarios that may run together, then each scenario that must run alone."""
    yield [scenario for scenario in scenarios if not scenario.exclusive]
    for scenario in scenarios:
        if scenario.exclusive:
            yield [scenario]


def _not_applicable(scenario: Scenario) -> dict[str, Cell]:
    return {
        each.name: Cell(NOT_APPLICABLE, {"reason": each.not_applicable[scenario.name]})
        for each in CONTESTANTS
        if scenario.name in each.not_applicable
    }


def _submit(
    scenario: Scenario, server: str, numbers: Iterator[int], processes: Executor
) -> Iterator[Future[dict[str, Cell]]]:
    if isinstance(scenario, InterleavedScenario):
        restarts = [[next(numbers) for _ in scenario.entries] for _ in range(scenario.restarts)]
        yield processes.submit(_run_interleaved, scenario.name, server, restarts)
    else:
        for contestant in CONTESTANTS:
            if scenario.name in contestant.not_applicable:
                continue
            yield processes.submit(_measure, scenario.name, contestant.name, server, next(numbers))


# The following functions run in the processes of the pool.


def _measure(scenario_name: str, contestant: str, server: str, number: int) -> dict[str, Cell]:
    scenario = find_scenario(scenario_name)
    assert isinstance(scenario, IndependentScenario)
    environment = Environment(contestant, server, number, **scenario.options)
    try:
        with environment:
            return {contestant: scenario.measure(environment)}
    except Exception as error:
        return {contestant: _failure(error, environment)}


def _run_interleaved(
    scenario_name: str, server: str, restarts: Sequence[Sequence[int]]
) -> dict[str, Cell]:
    scenario = find_scenario(scenario_name)
    assert isinstance(scenario, InterleavedScenario)
    times: dict[str, list[float]] = {entry: [] for entry in scenario.entries}
    environments: dict[str, Environment] = {}
    try:
        for numbers in restarts:
            with ExitStack() as stack:
                for number, (entry, (contestant, own)) in zip(
                    numbers, scenario.entries.items(), strict=True
                ):
                    environments[entry] = stack.enter_context(
                        Environment(contestant, server, number, **{**scenario.options, **own})
                    )
                for entry, seconds in scenario.run(environments).items():
                    times[entry] += seconds
        return scenario.measure(times)
    except Exception as error:
        failure = _failure(error, *environments.values())
        return {contestant.name: failure for contestant in CONTESTANTS}


def _failure(error: Exception, *environments: Environment) -> Cell:
    outputs = [f"{each.contestant}: {each.output_tail()}" for each in environments]
    facts: dict[str, Any] = {"traceback": traceback.format_exc(), "workers": outputs}
    return Cell(f"failed: {error}".splitlines()[0], facts, failed=True)
