"""Runs several contestants with several schedules, each in its own process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from labs.chaos import schedule
from labs.chaos.run import EXIT_SERVERS_FAILED
from labs.chaos.verdict import Verdict, judge
from labs.comparison.contestants import OURS
from tests.packaging.versions.library import Library

REPOSITORY = Path(__file__).parents[2]

#: A run mostly waits, so several of them run at the same time.
CONCURRENT_RUNS = 2
#: The other contestants get every n-th order, with all its calls, and the same faults.
ORDERS_OF_PEERS_ONE_IN = 4
#: Longest duration of a run, in seconds.
RUN_TIMEOUT = 300.0

#: Called periodically with the number of callers that have a result.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class RunSpec:
    """One contestant and one seed."""

    seed: int
    contestant: str
    tasks: int
    #: Whether effects are rows in PostgreSQL; for celery-idempotent only.
    transaction: bool = False
    #: A version whose workers take turns with those of this one.
    previous: Library | None = None

    @property
    def orders_one_in(self) -> int:
        """The schedule has every n-th order."""
        return 1 if self.contestant == OURS.name else ORDERS_OF_PEERS_ONE_IN

    @property
    def schedule(self) -> schedule.Schedule:
        """The schedule of the run."""
        whole = schedule.make(
            self.seed,
            self.tasks,
            transaction=self.transaction,
            versions=self.previous is not None,
        )
        return whole.with_orders(self.orders_one_in)

    def folder(self, root: Path) -> Path:
        """Returns the folder of its evidence."""
        return root / f"seed-{self.seed}-{self.title}"

    @property
    def title(self) -> str:
        """The contestant, where its effects are, and the other version."""
        other = f"-{self.previous.name}" if self.previous else ""
        return f"{self.contestant}{'-transaction' if self.transaction else ''}{other}"

    @property
    def command(self) -> str:
        """The command that repeats it."""
        variant = "TRANSACTION=1" if self.transaction else "OURS=1"
        if self.previous:
            return f"make versions SEED={self.seed} TASKS={self.tasks} OLD={self.previous.name}"
        return f"make chaos SEED={self.seed} TASKS={self.tasks} {variant}"


class RunError(Exception):
    """A run failed or timed out."""


class ServersFailedError(RunError):
    """Servers did not start, or did not recover from a fault; the run cannot be evaluated."""


def run(spec: RunSpec, root: Path, progress: Progress) -> Verdict:
    """Runs `spec` and returns the verdict; repeats the run once if its servers failed.

    Raises:
        RunError: if it times out, or ends without evidence.
    """
    try:
        return _run(spec, root, progress)
    except ServersFailedError:
        return _run(spec, root, progress)


def _run(spec: RunSpec, root: Path, progress: Progress) -> Verdict:
    folder = spec.folder(root)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *(
            sys.executable,
            "-m",
            "labs.chaos.run",
            str(spec.seed),
            spec.contestant,
            str(folder.absolute()),
        ),
        *("--tasks", str(spec.tasks), "--orders-one-in", str(spec.orders_one_in)),
        *(["--transaction"] if spec.transaction else []),
        *(["--previous", str(spec.previous.folder)] if spec.previous else []),
    ]
    with (
        (folder / "run.log").open("wb") as log,
        subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        watchdog = threading.Timer(RUN_TIMEOUT, process.kill)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            progress(int(line))
        watchdog.cancel()
    if process.returncode or not (folder / "observations.json").exists():
        last_line = (folder / "run.log").read_text(errors="replace").splitlines()[-1:]
        error = ServersFailedError if process.returncode == EXIT_SERVERS_FAILED else RunError
        raise error(f"{folder.name} exited with {process.returncode}: {' '.join(last_line)}")
    verdict = judge(spec.schedule, spec.contestant, folder)
    (folder / "verdict.json").write_text(verdict.to_json())
    return verdict


def run_all(
    specs: Sequence[RunSpec], root: Path, progress: Callable[[RunSpec], Progress]
) -> Iterator[tuple[RunSpec, Verdict | RunError]]:
    """Runs all `specs`, several at a time; yields their verdicts in order."""

    def attempt(spec: RunSpec) -> Verdict | RunError:
        try:
            return run(spec, root, progress(spec))
        except RunError as error:
            return error

    with ThreadPoolExecutor(CONCURRENT_RUNS) as pool:
        yield from zip(specs, pool.map(attempt, specs), strict=True)
