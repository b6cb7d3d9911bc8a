"""Runs of several contestants through several schedules, each in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.labs.chaos import schedule
from tests.labs.chaos.run import NOT_STRUCK
from tests.labs.chaos.verdict import Disposition, judge
from tests.labs.comparison.contestants import OURS

REPOSITORY = Path(__file__).parents[3]

#: Runs under way at a time: they wait half of theirs.
AT_A_TIME = 2
#: Peers get one order of so many, with all its calls, under the same faults.
PART_FOR_PEERS = 4
#: Seconds after which a run that does not end has hung.
HUNG = 300.0

#: Told now and then how many callers of a run have their answer.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Entry:
    """One contestant under one seed."""

    seed: int
    contestant: str
    tasks: int

    @property
    def part(self) -> int:
        """One order of so many."""
        return 1 if self.contestant == OURS.name else PART_FOR_PEERS

    @property
    def planned(self) -> schedule.Schedule:
        """What happens to it."""
        return schedule.make(self.seed, self.tasks).part(self.part)

    def folder(self, below: Path) -> Path:
        """Where its evidence is."""
        return below / f"seed-{self.seed}-{self.contestant}"

    @property
    def replay(self) -> str:
        """The command that runs it again."""
        return f"make chaos SEED={self.seed} TASKS={self.tasks} OURS=1"


class HungError(Exception):
    """A run did not come to its end."""


class NotStruckError(HungError):
    """Servers did not take a fault as they should, so that there is nothing to judge."""


def run(entry: Entry, below: Path, progress: Progress) -> Disposition:
    """Live through `entry`; once more where servers did not do their part.

    Raises:
        HungError: if it does not end, or ends without evidence.
    """
    try:
        return _run(entry, below, progress)
    except NotStruckError:
        return _run(entry, below, progress)


def _run(entry: Entry, below: Path, progress: Progress) -> Disposition:
    folder = entry.folder(below)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *(
            sys.executable,
            "-m",
            "tests.labs.chaos.run",
            str(entry.seed),
            entry.contestant,
            str(folder),
        ),
        *("--tasks", str(entry.tasks), "--part", str(entry.part)),
    ]
    with (
        (folder / "run.log").open("wb") as log,
        subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        watchdog = threading.Timer(HUNG, process.kill)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            progress(int(line))
        watchdog.cancel()
    if process.returncode or not (folder / "seen.json").exists():
        last = (folder / "run.log").read_text(errors="replace").splitlines()[-1:]
        kind = NotStruckError if process.returncode == NOT_STRUCK else HungError
        raise kind(f"{folder.name} has ended with {process.returncode}: {' '.join(last)}")
    verdict = judge(entry.planned, entry.contestant, folder)
    (folder / "verdict.json").write_text(verdict.write())
    return verdict


def run_all(
    entries: Sequence[Entry], below: Path, progress: Callable[[Entry], Progress]
) -> Iterator[tuple[Entry, Disposition | HungError]]:
    """All of them, some at a time; each as soon as those before it are over."""

    def attempt(entry: Entry) -> Disposition | HungError:
        try:
            return run(entry, below, progress(entry))
        except HungError as error:
            return error

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield from zip(entries, pool.map(attempt, entries), strict=True)
