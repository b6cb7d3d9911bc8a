"""The command line of the demo; ``--help`` lists its options.

Exit codes: 0 if each event was charged exactly once (in shadow: if the charges that would have been
prevented are exactly the double ones), 1 if not, 2 if the demo could not run, and 130
if it was interrupted.
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
    """A progress bar that advances with each reply."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar = progress.add_task("", total=None)

    def expect(self, replies: int) -> None:
        """Sets the number of replies to come."""
        self._progress.update(self._bar, total=replies)

    def stage(self, description: str) -> None:
        """Shows the current stage of the run."""
        self._progress.update(self._bar, description=description)

    def reply_received(self) -> None:
        """Advances the bar by one delivery."""
        self._progress.advance(self._bar)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code."""
    options = _parse(arguments)
    # The progress bar and errors go to stderr: stdout has the report only.
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        evidence = _run(options, stderr)
    except KeyboardInterrupt:
        stderr.print("Interrupted: worker and server are stopped, no report was made.")
        return INTERRUPTED
    except (EventsFileError, RedisServerError, WorkerError, NotKilledError, OSError) as error:
        stderr.print(str(error), markup=False)
        return COULD_NOT_RUN

    if options.json:
        print(json.dumps(as_json(evidence, task=options.task), indent=2))
    else:
        show(evidence, Console(highlight=False), task=options.task)
    return 1 if differences(evidence) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Publish webhook events to a real worker, kill one of its processes during a "
        "charge and one after a COMMIT, and check that each event was charged exactly once.",
    )
    parser.set_defaults(task="idempotent")
    task = parser.add_mutually_exclusive_group()
    task.add_argument(
        "--plain", action="store_const", const="plain", dest="task", help="use a plain celery.Task"
    )
    task.add_argument(
        "--shadow",
        action="store_const",
        const="shadow",
        dest="task",
        help="let every delivery charge, and count the charges that would have been prevented",
    )
    parser.add_argument(
        "--events",
        type=Path,
        default=EVENTS_FILE,
        metavar="FILE",
        help="other events, one JSON object a line",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep ledger.db, journal.db and worker.log in this folder",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, stderr: Console) -> Evidence:
    deliveries = read_deliveries(options.events)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        RedisServer() as server,
        _folder(options.keep) as folder,
        Progress(
            *columns, console=stderr, transient=True, disable=not stderr.is_terminal
        ) as progress,
    ):
        try:
            run = Run(
                deliveries,
                server.url,
                folder,
                plain=options.task == "plain",
                shadow=options.task == "shadow",
                progress=ProgressBar(progress),
            )
            return run()
        except Exception as error:
            # Celery raises many kinds of errors if its Redis has stopped.
            if _is_available(server):
                raise
            raise RedisServerError("The Redis server of this run has stopped.") from error


def _is_available(server: RedisServer) -> bool:
    try:
        with server.client() as client:
            return bool(client.ping())
    except RedisError:
        return False


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Gives `keep`, emptied of earlier ledgers, or a temporary folder."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="payments-") as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    for leftover in (*keep.glob("ledger.db*"), *keep.glob("journal.db*")):
        leftover.unlink()
    yield keep.resolve()
