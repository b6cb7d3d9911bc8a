"""Runs several contestants with several schedules, each in its own process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from labs.chaos.run import EXIT_SERVERS_FAILED, RunSpec
from labs.chaos.verdict import Verdict, judge
from tests.worker.harness import REPOSITORY

#: A run mostly waits, so several of them run at the same time.
CONCURRENT_RUNS = 2
#: Longest duration of a run, in seconds.
RUN_TIMEOUT = 300.0


class RunError(Exception):
    """A run failed or timed out."""


class ServersFailedError(RunError):
    """Servers did not start, or did not recover from a fault; the run cannot be evaluated."""


def run(spec: RunSpec, root: Path) -> Verdict:
    """Runs `spec` and returns the verdict; repeats the run once if its servers failed.

    Raises:
        RunError: if it times out, or ends without evidence.
    """
    try:
        return _run(spec, root)
    except ServersFailedError:
        return _run(spec, root)


def _run(spec: RunSpec, root: Path) -> Verdict:
    folder = root.absolute() / f"seed-{spec.seed}-{spec.title}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "labs.chaos.run", folder, json.dumps(asdict(spec))]
    log = folder / "run.log"
    with log.open("wb") as output:
        try:
            process = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
                timeout=RUN_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{folder.name}: {error}") from None
    if process.returncode or not (folder / "observations.json").exists():
        last_line = log.read_text(errors="replace").splitlines()[-1:]
        failure = ServersFailedError if process.returncode == EXIT_SERVERS_FAILED else RunError
        raise failure(f"{folder.name} exited with {process.returncode}: {' '.join(last_line)}")
    return judge(spec.schedule, spec.contestant, folder)


def run_all(specs: Sequence[RunSpec], root: Path) -> Iterator[tuple[RunSpec, Verdict | RunError]]:
    """Runs all `specs`, several at a time; yields their verdicts in order."""

    def attempt(spec: RunSpec) -> Verdict | RunError:
        try:
            return run(spec, root)
        except RunError as error:
            return error

    with ThreadPoolExecutor(CONCURRENT_RUNS) as pool:
        yield from zip(specs, pool.map(attempt, specs), strict=True)
