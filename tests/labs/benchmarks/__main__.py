"""``make bench``: measure, show the table, and write the pages if asked to."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tests.labs.benchmarks import machine, page, plots
from tests.labs.benchmarks.apart import measured
from tests.labs.benchmarks.figure import Finding
from tests.labs.benchmarks.measure import Measure
from tests.labs.benchmarks.measures import MEASURES
from tests.labs.benchmarks.report import MET, MISSED, Report, earlier


def main() -> int:
    wanted = _arguments()
    # What is asked for goes to standard output, and everything else beside it.
    beside = Console(stderr=True)
    report = _measure(wanted, beside)
    out = Console()
    # In a file there is room for all of it.
    (out if out.is_terminal else Console(width=120)).print(report.table())
    for name, why in report.broken().items():
        beside.rule(name)
        beside.print(why, markup=False)
    if wanted.json:
        Path(wanted.json).write_text(report.json() + "\n", encoding="utf-8")
    if wanted.write:
        images = plots.draw(report.findings, page.DOCS, page.FOLDER)
        beside.print("written:", *(path.name for path in page.write(report, images)), "and plots")
    if report.broken():
        beside.print(f"not measured: {', '.join(report.broken())}")
    beside.print(f"{report.verdict} ({report.seconds:.0f} s)")
    return 1 if report.broken() else 0


def _arguments() -> argparse.Namespace:
    names = [measure.name for measure in MEASURES]
    parser = argparse.ArgumentParser(prog="python -m tests.labs.benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="MEASURE",
        choices=names,
        help=f"these alone: {', '.join(names)}",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=12,
        help="what has not had its turn by then is not measured; 12 by default",
    )
    parser.add_argument("--json", metavar="FILE", help="write the raw values there")
    parser.add_argument("--against", metavar="FILE", help="show those of an earlier run beside")
    parser.add_argument(
        "--write", action="store_true", help="write tables, plots and raw values into docs/"
    )
    wanted = parser.parse_args()
    if wanted.write and wanted.only:
        parser.error("--write puts whole tables into docs/: leave out --only")
    return wanted


def _measure(wanted: argparse.Namespace, beside: Console) -> Report:
    measures = [each for each in MEASURES if not wanted.only or each.name in wanted.only]
    before = earlier(Path(wanted.against).read_text(encoding="utf-8")) if wanted.against else {}
    setting = machine.described()
    began_at = time.monotonic()
    findings = _findings(measures, wanted.minutes, beside)
    return Report(findings, setting, time.monotonic() - began_at, before)


def _findings(
    measures: Sequence[Measure], minutes: float, beside: Console
) -> dict[Measure, Finding]:
    findings = {}
    deadline = time.monotonic() + 60 * minutes
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=beside,
    ) as bars:
        bar = {each: bars.add_task(f"  {each.title}", total=1.0, start=False) for each in measures}
        for measure, task in bar.items():
            bars.start_task(task)
            left = deadline - time.monotonic()
            finding = measured(measure, left, lambda done, at=task: bars.update(at, completed=done))
            findings[measure] = finding
            mark = MISSED if any(each.is_met is False for each in finding.figures) else MET
            title = f"{'!' if finding.why_not else mark} {measure.title}"
            bars.update(task, completed=1.0, description=title)
            bars.stop_task(task)
            if not beside.is_terminal:  # where bars are drawn only when all is over
                beside.print(title)
    return findings


if __name__ == "__main__":
    sys.exit(main())
