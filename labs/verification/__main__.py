"""Runs the verification: searches the model, compares the scripts with it, and mutates both."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from labs.verification import live, lua_mutants, replay
from labs.verification.environment import Environment
from labs.verification.equivalent_mutants import EQUIVALENT_MUTANTS
from labs.verification.guards import GUARDS, search_without
from labs.verification.scenarios import LARGE, LIMITS, SCENARIOS
from labs.verification.search import SearchResult, format_counterexample, search
from tests.servers.redis_server import find_servers

PROCESSES = 2
STAGES = ("search", "guards", "replay", "live", "lua")


class Verification:
    """The stages, each of which returns a name and figures for a row of the final table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.failures: list[str] = []
        self.servers = list(find_servers())

    def run(self) -> None:
        for stage in self.options.only or STAGES:
            started_at, failures = time.monotonic(), len(self.failures)
            name, figures = getattr(self, stage)()
            mark = "✓" if len(self.failures) == failures else "✗"
            seconds = time.monotonic() - started_at
            print(f"{mark} {name}: {figures} ({seconds:.0f} s)", flush=True)

    def search(self) -> tuple[str, str]:
        states = transitions = 0
        names = [*(name for name in SCENARIOS if name not in LARGE), *LARGE]
        for name, result in self._map(_search, names):
            states, transitions = states + result.states, transitions + result.transitions
            if self.options.verbose:
                figures = f"{result.states:,} states, {result.transitions:,} steps"
                print(f"  {name}: {figures}, {result.seconds:.0f} s")
            if result.counterexample is not None:
                trace = "\n".join(format_counterexample(result.counterexample))
                self.failures.append(f"{name}:\n{trace}")
            elif not result.is_complete:
                self.failures.append(f"{name}: has too many states")
        figures = f"{len(names)} scenarios, {states:,} states, {transitions:,} steps"
        return "model searched", figures

    def guards(self) -> tuple[str, str]:
        detected = 0
        for guard, result in self._map(search_without, GUARDS):
            if result.counterexample is None:
                self.failures.append(f"nothing breaks without the guard {guard!r}")
                continue
            detected += 1
            if self.options.verbose:
                print(f"without: {GUARDS[guard][0]}")
                print(*format_counterexample(result.counterexample), sep="\n")
        for name, (scenario, violation) in LIMITS.items():
            counterexample = search(Environment(scenario)).counterexample
            if counterexample is None or counterexample.violation != violation:
                self.failures.append(f"the search does not find the known limit {name!r} any more")
        figures = f"{detected} of {len(GUARDS)} detected, {len(LIMITS)} known limits found"
        return "guards left out", figures

    def replay(self) -> tuple[str, str]:
        jobs = [(script, kind) for kind in self.servers for script in lua_mutants.SCRIPTS]
        for _, difference in self._map(_replay, jobs):
            self.failures += [difference] if difference else []
        number = replay.CASES * len(lua_mutants.SCRIPTS)
        return "single calls against the model", f"{number:,} on each of {', '.join(self.servers)}"

    def live(self) -> tuple[str, str]:
        jobs = [(kind, self.options.sequences, self.options.seed) for kind in self.servers]
        for _, difference in self._map(_live, jobs):
            self.failures += [difference] if difference else []
        return "sequences of calls", f"{self.options.sequences:,} on each of them"

    def lua(self) -> tuple[str, str]:
        mutants = lua_mutants.all_mutants()
        survived = set()
        for mutant, detected_by in self._map(replay.run, mutants):
            if self.options.verbose and detected_by:
                print(f"  by {detected_by}: {mutant.name}")
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

    @staticmethod
    def _map(function: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yields each job with its result, as they finish."""
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
            # Start with the last: the largest are at the end of each list.
            futures = {pool.submit(function, job): job for job in reversed(list(jobs))}
            for future in as_completed(futures):
                yield futures[future], future.result()


def _search(name: str) -> SearchResult:
    return search(Environment(SCENARIOS[name]))


def _replay(job: tuple[str, str]) -> str:
    return replay.mismatch(*job)


def _live(job: tuple[str, int, int]) -> str:
    return live.mismatch(*job)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.verification", description=__doc__)
    parser.add_argument("--only", action="extend", nargs="+", choices=STAGES, metavar="STAGE",
                        help="run only these stages: " + ", ".join(STAGES))  # fmt: skip
    parser.add_argument("--sequences", type=int, default=300,
                        help="of calls on each server (%(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the sequences (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print each scenario and mutant")
    return parser.parse_args()


def main() -> int:
    started_at = time.monotonic()
    verification = Verification(_options())
    verification.run()
    for failure in verification.failures:
        print(f"✗ {failure}", file=sys.stderr)
    verdict = f"{len(verification.failures)} failures" if verification.failures else "all passed"
    print(f"{verdict} ({time.monotonic() - started_at:.0f} s)")
    return 1 if verification.failures else 0


if __name__ == "__main__":
    sys.exit(main())
