"""Runs the verification: searches the model, tests the scripts, and mutates both."""

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

from labs.verification import (
    conformance_run,
    lua_mutants,
    replay,
    table,
    turn_environments,
    turn_table,
)
from labs.verification.environment import Environment
from labs.verification.environments import LIMITS, LONG
from labs.verification.equivalent_mutants import EQUIVALENT_MUTANTS
from labs.verification.model_mutants import MUTANTS
from labs.verification.search import SearchResult, format_counterexample, search
from labs.verification.turn_environment import TurnEnvironment
from tests.servers.redis_server import find_servers

PROCESSES = 2
_MUTANTS = [*MUTANTS, *turn_environments.MUTANTS]
STAGES = ("search", "mistakes", "table", "sequences", "lua")


class Verification:
    """The stages, each of which returns a name and figures for a row of the final table."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console
        self.rows: list[tuple[str, str, str, float, float]] = []
        self.failures: list[str] = []
        self.servers = list(find_servers())

    def run(self) -> None:
        for stage in self.options.only or STAGES:
            started_at, cpu, failures = time.monotonic(), _cpu_seconds(), len(self.failures)
            name, figures = getattr(self, stage)()
            mark = "✓" if len(self.failures) == failures else "✗"
            seconds, cpu = time.monotonic() - started_at, _cpu_seconds() - cpu
            self.rows.append((mark, name, figures, seconds, cpu))
            self.console.print(f"{mark} {name}: {figures} ({seconds:.0f} s)", markup=False)

    def search(self) -> tuple[str, str]:
        states = transitions = 0
        environments = [*((Environment, name) for name in LONG), *_turn_environments()]
        for (_, name), result in self._map("searching", _search, environments):
            states, transitions = states + result.states, transitions + result.transitions
            if self.options.verbose:
                self.console.print(
                    f"  {name}: {result.states:,} states, {result.transitions:,} steps, "
                    f"{result.depth} deep, {result.seconds:.0f} s"
                )
            if result.counterexample is not None:
                trace = "\n".join(format_counterexample(result.counterexample))
                self.failures.append(f"{name}: {result.counterexample.violation}\n{trace}")
        figures = f"{len(environments)} environments, {states:,} states, {transitions:,} steps"
        return "model searched", figures

    def mistakes(self) -> tuple[str, str]:
        detected = 0
        names = [mutant.name for mutant in _MUTANTS]
        for name, result in self._map("mutating the model", _search_mutant, names):
            if result.counterexample is None:
                self.failures.append(f"the mistake {name!r} in the model is not detected")
                continue
            detected += 1
            if self.options.verbose:
                self.console.rule(name)
                trace = "\n".join(format_counterexample(result.counterexample))
                self.console.print(trace, markup=False)
        for name, (arguments, violation) in LIMITS.items():
            counterexample = search(Environment(**arguments)).counterexample
            if counterexample is None or counterexample.violation != violation:
                self.failures.append(f"the search does not find the known limit {name!r} any more")
        figures = f"{detected} of {len(_MUTANTS)} detected, {len(LIMITS)} known limits found"
        return "mistakes in the model", figures

    def table(self) -> tuple[str, str]:
        jobs = [
            (kind, script)
            for kind in self.servers
            for script in {**table.ARGUMENTS, **turn_table.ARGUMENTS}
        ]
        total = 0
        for _, (calls, mismatches) in self._map("single calls", _table, jobs):
            total += calls
            self.failures += mismatches
        return "single calls against the model", f"{total:,} on {', '.join(self.servers)}"

    def sequences(self) -> tuple[str, str]:
        # A sequence may end before its full length.
        steps_per_job = conformance_run.EXAMPLES * conformance_run.STEPS * 2 // 3
        jobs = [
            (self.servers[number % len(self.servers)], self.options.seed + number)
            for number in range(-(-self.options.steps // steps_per_job))
        ]
        steps = restarts = 0
        for (kind, seed), result in self._map("sequences of calls", _sequences, jobs):
            steps, restarts = steps + result.steps, restarts + result.restarts
            if result.failure:
                self.failures.append(f"sequence on {kind} with seed {seed}:\n{result.failure}")
        return "sequences of calls", f"{steps:,} steps, {restarts} restarts of a server"

    def lua(self) -> tuple[str, str]:
        # Mutants are compared with the results of the scripts, so these must equal the model's.
        for _, mismatches in self._map("replaying the scripts", _mismatches, replay.names()):
            self.failures += mismatches
        mutants = lua_mutants.all_mutants()
        survived = set()
        for mutant, detected_by in self._map("mutating the Lua", replay.run, mutants):
            if self.options.verbose and detected_by:
                self.console.print(f"  by {detected_by}: {mutant.name}", markup=False)
            if not detected_by:
                survived.add(mutant.name)
                if mutant.name not in EQUIVALENT_MUTANTS:
                    self.failures.append(f"survives: {mutant.name} (line {mutant.line})")
        self.failures += [
            f"is listed as equivalent, but is detected or gone: {name}"
            for name in EQUIVALENT_MUTANTS.keys() - survived
        ]
        detected, equivalent = len(mutants) - len(survived), survived & EQUIVALENT_MUTANTS.keys()
        figures = f"{detected:,} of {len(mutants):,} detected, {len(equivalent)} equivalent"
        return "mutants of the Lua", figures

    def _map(
        self, description: str, function: Callable[[Any], Any], jobs: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """Yields each job with its result, as they finish."""
        jobs = list(jobs)
        with (
            Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TimeElapsedColumn(), console=self.console,
            ) as progress,
            ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool,
        ):  # fmt: skip
            bar = progress.add_task(description, total=len(jobs))
            # Start with the last: the largest are at the end of each list.
            futures = {pool.submit(function, job): job for job in reversed(jobs)}
            for future in as_completed(futures):
                progress.advance(bar)
                yield futures[future], future.result()

    def summary(self) -> Table:
        summary = Table("", "", "", "s", "processor s")
        for mark, name, figures, seconds, cpu in self.rows:
            summary.add_row(mark, name, figures, f"{seconds:.0f}", f"{cpu:.0f}")
        return summary


def _cpu_seconds() -> float:
    """Returns the processor time so far, without the servers'."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _turn_environments() -> list[tuple[type, str]]:
    return [(TurnEnvironment, name) for name in turn_environments.LONG]


def _search(job: tuple[type, str]) -> SearchResult:
    kind, name = job
    environments = LONG if kind is Environment else turn_environments.LONG
    environment: Environment = kind(**environments[name])
    return search(environment)


def _search_mutant(name: str) -> SearchResult:
    return next(mutant for mutant in _MUTANTS if mutant.name == name).search()


def _table(job: tuple[str, str]) -> tuple[int, list[str]]:
    return conformance_run.table_on(*job)


def _sequences(job: tuple[str, int]) -> conformance_run.SequenceResult:
    return conformance_run.sequences_on(*job)


def _mismatches(script: str) -> list[str]:
    return [*replay.mismatches(script)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.verification", description=__doc__)
    parser.add_argument("--only", action="extend", nargs="+", choices=STAGES, metavar="STAGE",
                        help="run only these stages: " + ", ".join(STAGES))  # fmt: skip
    parser.add_argument("--steps", type=int, default=120_000, help="of all sequences (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print each environment and mutant")
    return parser.parse_args()


def main() -> int:
    started_at = time.monotonic()
    console = Console(stderr=True)
    verification = Verification(_options(), console)
    verification.run()
    Console().print(verification.summary())
    for failure in verification.failures:
        console.print(f"✗ {failure}", style="red", markup=False)
    verdict = f"{len(verification.failures)} failures" if verification.failures else "all passed"
    console.print(f"{verdict} ({time.monotonic() - started_at:.0f} s)")
    return 1 if verification.failures else 0


if __name__ == "__main__":
    sys.exit(main())
