"""``python -m tests.labs.comparison``: measures, prints the table, fails if a goal is missed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_idempotent.testing.server import RedisServer
from tests.labs.comparison import runner
from tests.labs.comparison.contestants import CONTESTANTS
from tests.labs.comparison.report import MET, MISSED, Report
from tests.labs.comparison.scenario import Cell, Row
from tests.labs.comparison.scenarios import ROWS


def main() -> int:
    wanted = _arguments()
    rows = [row for row in ROWS if not wanted.only or row.name in wanted.only]
    # What is asked for goes to standard output, and everything else beside it.
    beside = Console(stderr=True)
    report = _measure(rows, beside)
    for row, contestant, cell in report.broken():
        beside.rule(f"{row.name}: {contestant}")
        beside.print(cell.facts["traceback"], *cell.facts["workers"], sep="\n", markup=False)
    if wanted.json:
        print(report.json())
    elif wanted.markdown:
        print(report.markdown())
    else:
        Console().print(report.table())
    beside.print(f"{report.verdict} ({report.seconds:.0f} s)")
    return 1 if report.missed() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.comparison", description=__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="ROW",
        choices=[row.name for row in ROWS],
        help="these rows alone: " + ", ".join(row.name for row in ROWS),
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the facts behind the table")
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


def _measure(rows: Sequence[Row], beside: Console) -> Report:
    began_at = time.monotonic()
    with (
        RedisServer.start(config={"databases": str(runner.databases(rows))}) as server,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=beside,
        ) as bars,
    ):
        bar = {
            row.name: bars.add_task(f"  {row.title}", total=len(CONTESTANTS), start=False)
            for row in rows
        }

        def show(row: Row, cells: Mapping[str, Cell]) -> None:
            if not cells:
                bars.start_task(bar[row.name])
            elif len(cells) == len(CONTESTANTS):
                mark = MET if row.is_met(cells) else MISSED
                bars.update(bar[row.name], description=f"{mark} {row.title}")
            bars.update(bar[row.name], completed=len(cells))

        cells = runner.run(rows, server, show)
        told = f"{server.flavour} {server.version}"
    return Report(rows, cells, told, time.monotonic() - began_at)


if __name__ == "__main__":
    sys.exit(main())
