"""``make bench``: measures, prints the tables, and writes them into docs/ on request."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from labs.benchmarks import page
from labs.benchmarks.figure import MeasureResult
from labs.benchmarks.isolation import run_in_process
from labs.benchmarks.measure import FIGURES, Measure
from labs.benchmarks.measures import MEASURES, find_measure
from labs.benchmarks.report import Report
from labs.rig.report import MET, MISSED, setting


def main() -> int:
    arguments = _arguments()
    measures = [find_measure(name) for name in arguments.only or ()]
    measures = measures or [each for each in MEASURES if each.section == FIGURES]
    load = f"load average before the run: {os.getloadavg()[0]:.1f}"
    report = Report(
        _measure(measures, arguments.minutes),
        f"{setting('celery-once', 'celery-singleton')}; {load}",
    )
    sections = dict.fromkeys(measure.section for measure in measures)
    print(report.setting, *map(report.figures, sections), report.summary, sep="\n\n")
    if arguments.json:
        Path(arguments.json).write_text(report.json() + "\n", encoding="utf-8")
    if arguments.write:
        page.write(report)
    return 1 if any(result.failure for result in report.results.values()) else 0


def _arguments() -> argparse.Namespace:
    names = [measure.name for measure in MEASURES]
    parser = argparse.ArgumentParser(prog="python -m labs.benchmarks", description=__doc__)
    only = f"run these measures only: {', '.join(names)}"
    parser.add_argument("--only", nargs="+", metavar="MEASURE", choices=names, help=only)
    minutes = "end the running measure at this time, and start no other; default: 25"
    parser.add_argument("--minutes", type=float, default=25, help=minutes)
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--write", action="store_true", help="write tables and figures into docs/")
    arguments = parser.parse_args()
    chosen = [find_measure(name) for name in arguments.only or ()]
    if arguments.write and any(measure.section == FIGURES for measure in chosen):
        parser.error("--write replaces whole tables in docs/: leave out --only")
    return arguments


def _measure(measures: Sequence[Measure], minutes: float) -> dict[Measure, MeasureResult]:
    results = {}
    deadline = time.monotonic() + 60 * minutes
    for measure in measures:
        result = results[measure] = run_in_process(measure, deadline - time.monotonic())
        mark = MISSED if any(each.is_met is False for each in result.figures) else MET
        print(f"{'!' if result.failure else mark} {measure.title}", file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
