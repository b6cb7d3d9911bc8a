"""The whole proof: the model searched and broken, the scripts hunted and broken."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from celery_idempotent.testing.server import Binary, find_servers
from tests.labs.verification import conformance_run, lua_mutants, mutation_run, table
from tests.labs.verification.environment import Runtime
from tests.labs.verification.environments import LIMITS, LONG
from tests.labs.verification.equivalent_mutants import SURVIVORS
from tests.labs.verification.model_mutants import MUTANTS
from tests.labs.verification.search import Searched, search, told

PROCESSES = 2
STAGES = ("search", "mistakes", "table", "sequences", "lua")


class Course:
    """The stages, each a row of the table at the end."""

    def __init__(self, wanted: argparse.Namespace, beside: Console) -> None:
        self.wanted = wanted
        self.beside = beside
        self.rows: list[tuple[str, str, str, float, float]] = []
        #: What is wrong, a line each.
        self.wrong: list[str] = []
        self.discovery = [
            kind for kind, found in find_servers().items() if isinstance(found, Binary)
        ]

    def run(self) -> None:
        for stage in self.wanted.only or STAGES:
            began_at, busy, known = time.monotonic(), _busy(), len(self.wrong)
            what, figures = getattr(self, stage)()
            mark = "✓" if len(self.wrong) == known else "✗"
            self.rows.append((mark, what, figures, time.monotonic() - began_at, _busy() - busy))

    def search(self) -> tuple[str, str]:
        states = moves = 0
        for name, searched in self._all("searching", _search, LONG):
            states, moves = states + searched.states, moves + searched.moves
            if self.wanted.verbose:
                self.beside.print(
                    f"  {name}: {searched.states:,} states, {searched.moves:,} steps, "
                    f"{searched.depth} deep, {searched.seconds:.0f} s"
                )
            if searched.found is not None:
                self._tells(name, searched)
        return "model searched", f"{len(LONG)} worlds, {states:,} states, {moves:,} steps"

    def mistakes(self) -> tuple[str, str]:
        caught = 0
        for name, searched in self._all("breaking the model", _hunt, [one.name for one in MUTANTS]):
            if searched.found is None:
                self.wrong.append(f"the model with the mistake {name!r} is not caught")
                continue
            caught += 1
            if self.wanted.verbose:
                self._shows(name, searched)
        for name, (setting, wrong) in LIMITS.items():
            found = search(Runtime(**setting)).found
            if found is None or found.wrong != wrong:
                self.wrong.append(f"the limit {name!r} is none any more")
        return (
            "mistakes in the model",
            f"{caught} of {len(MUTANTS)} caught, {len(LIMITS)} limits known",
        )

    def table(self) -> tuple[str, str]:
        jobs = [(kind, script) for kind in self.discovery for script in table.ARGUMENTS]
        calls = 0
        for _, (made, wrong) in self._all("single calls", _table, jobs):
            calls += made
            self.wrong += wrong
        return "single calls against the model", f"{calls:,} on {', '.join(self.discovery)}"

    def sequences(self) -> tuple[str, str]:
        each = (
            conformance_run.EXAMPLES * conformance_run.STEPS * 2 // 3
        )  # a sequence may end before its length
        jobs = [
            (self.discovery[number % len(self.discovery)], self.wanted.seed + number)
            for number in range(-(-self.wanted.steps // each))
        ]
        steps = restarts = 0
        for (kind, seed), hunted in self._all("sequences of calls", _sequences, jobs):
            steps, restarts = steps + hunted.steps, restarts + hunted.restarts
            if hunted.wrong:
                self.wrong.append(f"sequence on {kind} with seed {seed}:\n{hunted.wrong}")
        return "sequences of calls", f"{steps:,} steps, {restarts} restarts of a server"

    def lua(self) -> tuple[str, str]:
        unbroken = lua_mutants.unbroken()
        if mutation_run.judge(unbroken).killed_by:
            self.wrong.append("the Lua as it is does not pass")
            return "mutants of the Lua", "not tried"
        mutants = lua_mutants.all_mutants()
        killed = 0
        known: set[str] = set()
        for _, verdict in self._all("breaking the Lua", _kill, mutants):
            name = verdict.mutant.name
            if verdict.killed_by:
                killed += 1
                if self.wanted.verbose and verdict.killed_by != mutation_run.TABLE:
                    self.beside.print(f"  by {verdict.killed_by}: {name}", markup=False)
            elif name in SURVIVORS:
                known.add(name)
            else:
                self.wrong.append(f"survives: {name} (line {verdict.mutant.line})")
        self.wrong += [
            f"is said to survive, and does not: {name}" for name in set(SURVIVORS) - known
        ]
        return "mutants of the Lua", f"{killed:,} of {len(mutants):,} killed, {len(known)} equal"

    def _all(
        self, told: str, work: Callable[[Any], Any], jobs: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        jobs = list(jobs)
        with (
            Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TimeElapsedColumn(), console=self.beside,
            ) as bars,
            ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool,
        ):  # fmt: skip
            bar = bars.add_task(told, total=len(jobs))
            # The largest come last in each list, and would be waited for.
            running = {pool.submit(work, job): job for job in reversed(jobs)}
            for done in as_completed(running):
                bars.advance(bar)
                yield running[done], done.result()

    def _tells(self, name: str, searched: Searched) -> None:
        assert searched.found is not None
        self.wrong.append(f"{name}: {searched.found.wrong}\n" + "\n".join(told(searched.found)))

    def _shows(self, name: str, searched: Searched) -> None:
        assert searched.found is not None
        self.beside.rule(name)
        self.beside.print("\n".join(told(searched.found)), markup=False)

    def result(self) -> Table:
        result = Table("", "", "", "s", "processor s")
        for mark, what, figures, seconds, busy in self.rows:
            result.add_row(mark, what, figures, f"{seconds:.0f}", f"{busy:.0f}")
        return result


def _busy() -> float:
    """Processor seconds so far, without the servers': on a busy machine they tell more."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _search(name: str) -> Searched:
    return search(Runtime(**LONG[name]))


def _hunt(name: str) -> Searched:
    return next(one for one in MUTANTS if one.name == name).conformance_run()


def _table(job: tuple[str, str]) -> tuple[int, list[str]]:
    return conformance_run.table_on(*job)


def _sequences(job: tuple[str, int]) -> conformance_run.Hunted:
    return conformance_run.sequences_on(*job)


def _kill(mutant: lua_mutants.Mutant) -> mutation_run.Disposition:
    return mutation_run.judge(mutant)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.verification", description=__doc__)
    parser.add_argument("--only", action="extend", nargs="+", choices=STAGES, metavar="STAGE",
                        help="these alone: " + ", ".join(STAGES))  # fmt: skip
    parser.add_argument("--steps", type=int, default=120_000, help="of all sequences (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="tell of each world and mutant")
    return parser.parse_args()


def main() -> int:
    began_at = time.monotonic()
    beside = Console(stderr=True)
    runner = Course(_arguments(), beside)
    runner.run()
    Console().print(runner.result())
    for wrong in runner.wrong:
        beside.print(f"✗ {wrong}", style="red", markup=False)
    verdict = "all as it should be" if not runner.wrong else f"{len(runner.wrong)} things are wrong"
    beside.print(f"{verdict} ({time.monotonic() - began_at:.0f} s)")
    return 1 if runner.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
