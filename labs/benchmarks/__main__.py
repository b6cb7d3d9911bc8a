"""``make bench``: measures, prints the table, and writes the pages of docs/ on request."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from labs.benchmarks import machine, page, plots
from labs.benchmarks.figure import MeasureResult
from labs.benchmarks.isolation import run_in_process
from labs.benchmarks.measure import FIGURES, Measure
from labs.benchmarks.measures import MEASURES, find_measure
from labs.benchmarks.report import MET, MISSED, Report, parse_values
from labs.comparison.install import install_peers


def main() -> int:
    arguments = _arguments()
    # The table goes to standard output, everything else to standard error.
    stderr = Console(stderr=True)
    report = _run(arguments, stderr)
    stdout = Console()
    # A file has room for the whole table.
    (stdout if stdout.is_terminal else Console(width=120)).print(report.table())
    for name, reason in report.failures().items():
        stderr.rule(name)
        stderr.print(reason, markup=False)
    if arguments.json:
        Path(arguments.json).write_text(report.json() + "\n", encoding="utf-8")
    if arguments.write:
        images = plots.draw(report.results, page.DOCS, page.FOLDER)
        # The comparison with an earlier run is for those who run it.
        written = page.write(replace(report, before={}), images)
        stderr.print("written:", *(path.name for path in written), "and plots")
    if report.failures():
        stderr.print(f"not measured: {', '.join(report.failures())}")
    stderr.print(f"{report.summary} ({report.seconds:.0f} s)")
    return 1 if report.failures() else 0


def _arguments() -> argparse.Namespace:
    names = [measure.name for measure in MEASURES]
    parser = argparse.ArgumentParser(prog="python -m labs.benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="MEASURE",
        choices=names,
        help=f"run these measures only: {', '.join(names)}",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=25,
        help="end the running measure at this time, and start no other; default: 25",
    )
    parser.add_argument("--json", metavar="FILE", help="write the raw values to FILE")
    parser.add_argument("--against", metavar="FILE", help="compare with the values in FILE")
    parser.add_argument(
        "--write", action="store_true", help="write tables, plots and raw values into docs/"
    )
    arguments = parser.parse_args()
    chosen = [find_measure(name) for name in arguments.only or ()]
    if arguments.write and any(measure.section == FIGURES for measure in chosen):
        parser.error("--write replaces whole tables in docs/: leave out --only")
    return arguments


def _run(arguments: argparse.Namespace, stderr: Console) -> Report:
    measures = [
        each
        for each in MEASURES
        if (each.name in arguments.only if arguments.only else each.section == FIGURES)
    ]
    before = {}
    if arguments.against:
        before = parse_values(Path(arguments.against).read_text(encoding="utf-8"))
    if any(measure.section == FIGURES for measure in measures):
        try:
            install_peers()
        except CalledProcessError as error:
            stderr.print(f"left out, since pip failed: {error}", markup=False)
    setting = machine.describe_machine()
    started_at = time.monotonic()
    results = _measure(measures, arguments.minutes, stderr)
    return Report(results, setting, time.monotonic() - started_at, before)


def _measure(
    measures: Sequence[Measure], minutes: float, stderr: Console
) -> dict[Measure, MeasureResult]:
    results = {}
    deadline = time.monotonic() + 60 * minutes
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=stderr,
    ) as bars:
        bar = {each: bars.add_task(f"  {each.title}", total=1.0, start=False) for each in measures}
        for measure, task in bar.items():
            bars.start_task(task)
            result = results[measure] = run_in_process(
                measure,
                deadline - time.monotonic(),
                lambda share, task=task: bars.update(task, completed=share),
            )
            mark = MISSED if any(each.is_met is False for each in result.figures) else MET
            title = f"{'!' if result.missing else mark} {measure.title}"
            bars.update(task, completed=1.0, description=title)
            bars.stop_task(task)
            if not stderr.is_terminal:  # there, the bars are printed only at the end
                stderr.print(title)
    return results


if __name__ == "__main__":
    sys.exit(main())
