"""``make peers``: runs all scenarios, prints the table, fails if one differs.

Each scenario has an expected result for celery-idempotent. Several run at a time, but those that
compare durations one at a time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import count

from labs.comparison.contestants import CONTESTANTS
from labs.comparison.environment import DATABASES_EACH, Environment
from labs.comparison.install import install_peers
from labs.comparison.scenario import Cell, Scenario
from labs.comparison.scenarios import SCENARIOS, find_scenario
from labs.rig.report import MET, MISSED, markdown, setting
from tests.servers.redis_server import RedisServer

#: Each process mostly waits, but starts a worker.
PROCESSES = 8
#: The text of a cell whose contestant does not take part.
NOT_APPLICABLE = "–"

#: By scenario and contestant.
Cells = Mapping[str, Mapping[str, Cell]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make peers", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", choices=names, help=f"of {names}")
    only = parser.parse_args().only
    scenarios = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    install_peers()
    databases = f"{1 + len(scenarios) * len(CONTESTANTS) * DATABASES_EACH}"
    with RedisServer.start(config={"databases": databases}) as server:
        cells = run(scenarios, server.url)
    print(setting(), *table(scenarios, cells), sep="\n\n")
    missed = [each.name for each in scenarios if not each.is_met(cells[each.name])]
    print(f"not as expected: {missed}" if missed else "as expected", file=sys.stderr)
    return 1 if missed else 0


def run(scenarios: Sequence[Scenario], url: str) -> Cells:
    """Returns the cells; prints a failure when it happens."""
    cells: dict[str, dict[str, Cell]] = defaultdict(dict)
    numbers = count()
    together = [scenario for scenario in scenarios if not scenario.exclusive]
    batches = [together, *([scenario] for scenario in scenarios if scenario.exclusive)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as processes:
        for batch in batches:
            futures: dict[Future[Cell], tuple[str, str]] = {}
            for scenario in batch:
                for contestant in CONTESTANTS:
                    cell = scenario.name, contestant.name
                    if scenario.name in contestant.not_applicable:
                        cells[scenario.name][contestant.name] = Cell(NOT_APPLICABLE)
                    else:
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
    environment = Environment(contestant, url, number, **scenario.options)
    try:
        with environment:
            return scenario.measure(environment)
    except Exception as error:
        failure = f"{traceback.format_exc()}\n{environment.log()[-3000:]}"
        return Cell(f"failed: {error}".splitlines()[0], failure=failure)


def table(scenarios: Sequence[Scenario], cells: Cells) -> list[str]:
    """Returns the table as Markdown, and why contestants do not take part in some scenarios."""
    headings = ["", *(f"{each.name} {each.version}" for each in CONTESTANTS), "expected", ""]
    lines = [
        [
            scenario.title,
            *(cells[scenario.name][each.name].text for each in CONTESTANTS),
            scenario.expected,
            MET if scenario.is_met(cells[scenario.name]) else MISSED,
        ]
        for scenario in scenarios
    ]
    reasons = [
        f"{NOT_APPLICABLE} {each.name}, {name}: {reason}"
        for each in CONTESTANTS
        for name, reason in each.not_applicable.items()
        if any(name == scenario.name for scenario in scenarios)
    ]
    return [markdown(headings, lines), *reasons]


if __name__ == "__main__":
    sys.exit(main())
