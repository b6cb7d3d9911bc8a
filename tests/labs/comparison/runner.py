"""Runs rows: several at a time where they mostly wait, one at a time where durations count."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import count
from typing import Any

from celery_idempotent.testing.server import RedisServer
from tests.labs.comparison.contestants import CONTESTANTS
from tests.labs.comparison.environment import DATABASES_EACH, Environment
from tests.labs.comparison.scenario import Cell, Race, Row, Scenario
from tests.labs.comparison.scenarios import row_named

#: Scenarios under way at a time. They wait most of their time, but each starts a worker.
AT_A_TIME = 8

#: Told after each cell: the row, and the cells that it has by now.
Progress = Callable[[Row, Mapping[str, Cell]], None]


def run(rows: Sequence[Row], server: RedisServer, progress: Progress) -> dict[str, dict[str, Cell]]:
    """The cells, by row and contestant."""
    cells: dict[str, dict[str, Cell]] = defaultdict(dict)
    numbers = count()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_A_TIME, mp_context=context) as processes:
        for batch in _batches(rows):
            parts: dict[Future[dict[str, Cell]], Row] = {}
            for row in batch:
                progress(row, {})
                for part in _submit(row, server.url, numbers, processes):
                    parts[part] = row
            for part in as_completed(parts):
                row = parts[part]
                cells[row.name] |= part.result()
                progress(row, cells[row.name])
    return cells


def databases(rows: Sequence[Row]) -> int:
    """How many the server must have."""
    arenas = sum(
        len(row.entries) * row.heats if isinstance(row, Race) else len(CONTESTANTS) for row in rows
    )
    return 1 + arenas * DATABASES_EACH


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that may run together: all that need no quiet, then each of the others by itself."""
    yield [row for row in rows if not row.quiet]
    for row in rows:
        if row.quiet:
            yield [row]


def _submit(
    row: Row, server: str, numbers: Iterator[int], processes: Executor
) -> Iterator[Future[dict[str, Cell]]]:
    if isinstance(row, Race):
        arenas = [[next(numbers) for _ in row.entries] for _ in range(row.heats)]
        yield processes.submit(_race, row.name, server, arenas)
    else:
        for contestant in CONTESTANTS:
            yield processes.submit(_measure, row.name, contestant.name, server, next(numbers))


# What follows runs in the processes.


def _measure(row_name: str, contestant: str, server: str, number: int) -> dict[str, Cell]:
    row = row_named(row_name)
    assert isinstance(row, Scenario)
    environment = Environment(contestant, server, number, **row.given)
    try:
        with environment:
            return {contestant: row.measure(environment)}
    except Exception as error:
        return {contestant: _broken(error, environment)}


def _race(row_name: str, server: str, heats: Sequence[Sequence[int]]) -> dict[str, Cell]:
    row = row_named(row_name)
    assert isinstance(row, Race)
    times: dict[str, list[float]] = {entry: [] for entry in row.entries}
    arenas: dict[str, Environment] = {}
    try:
        for numbers in heats:
            with ExitStack() as stack:
                for number, (entry, (contestant, own)) in zip(
                    numbers, row.entries.items(), strict=True
                ):
                    arenas[entry] = stack.enter_context(
                        Environment(contestant, server, number, **{**row.given, **own})
                    )
                for entry, seconds in row.run(arenas).items():
                    times[entry] += seconds
        return row.measure(times)
    except Exception as error:
        broken = _broken(error, *arenas.values())
        return {contestant.name: broken for contestant in CONTESTANTS}


def _broken(error: Exception, *arenas: Environment) -> Cell:
    words = [f"{environment.contestant}: {environment.output_tail()}" for environment in arenas]
    facts: dict[str, Any] = {"traceback": traceback.format_exc(), "workers": words}
    return Cell(f"broken: {error}".splitlines()[0], facts, broken=True)
