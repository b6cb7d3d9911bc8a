"""Command line of the demo; ``--help`` tells its options.

Exit codes: 0 each event was charged exactly once, 1 it was not, 2 the demo could not run,
130 it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from redis import RedisError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_idempotent.testing.server import RedisServer, RedisServerError

from .events import EVENTS_FILE, EventsFileError, read_deliveries
from .kill import NotKilledError
from .report import as_json, show
from .run import Run
from .verdict import Evidence, differences
from .worker import WorkerError

COULD_NOT_RUN = 2
INTERRUPTED = 130


class ProgressBar:
    """The bar that runs while the events do, one step an answer."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar = progress.add_task("", total=None)

    def expect(self, answers: int) -> None:
        """So many answers will come."""
        self._progress.update(self._bar, total=answers)

    def stage(self, description: str) -> None:
        """A new part of the run begins."""
        self._progress.update(self._bar, description=description)

    def answered(self) -> None:
        """One more delivery has its answer."""
        self._progress.advance(self._bar)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = _parse(arguments)
    # The bar and what goes wrong go to stderr, so that stdout holds the report and nothing else.
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        evidence = _run(options, aside)
    except KeyboardInterrupt:
        aside.print("Interrupted: worker and server are stopped, nothing was judged.")
        return INTERRUPTED
    except (EventsFileError, RedisServerError, WorkerError, NotKilledError, OSError) as error:
        aside.print(str(error), markup=False)
        return COULD_NOT_RUN

    if options.json:
        print(json.dumps(as_json(evidence, plain=options.plain), indent=2))
    else:
        show(evidence, Console(highlight=False), plain=options.plain)
    return 1 if differences(evidence) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.payments",
        description="Feed webhook events to a real worker, kill one of its processes in the "
        "middle of a charge, and see whether each event was charged exactly once.",
    )
    parser.add_argument(
        "--plain", action="store_true", help="run the same task on a plain celery.Task"
    )
    parser.add_argument(
        "--events", type=Path, default=EVENTS_FILE, metavar="FILE", help="your own JSON lines"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave ledger.db and worker.log there"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, aside: Console) -> Evidence:
    deliveries = read_deliveries(options.events)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        # Settings of its own make it a server of its own: REDIS_URL may be somebody's real one.
        RedisServer.start(config={}) as server,
        _folder(options.keep) as folder,
        Progress(
            *columns, console=aside, transient=True, disable=not aside.is_terminal
        ) as progress,
    ):
        try:
            return Run(deliveries, server.url, folder, options.plain, ProgressBar(progress))()
        except Exception as error:
            # Celery has many ways to say so.
            if _answers(server):
                raise
            raise RedisServerError("The Redis server of this run is gone.") from error


def _answers(server: RedisServer) -> bool:
    try:
        with server.client() as client:
            return bool(client.ping())
    except RedisError:
        return False


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the run's files: `keep`, emptied of an earlier run's, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="payments-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    for leftover in keep.glob("ledger.db*"):
        leftover.unlink()
    yield keep.resolve()
