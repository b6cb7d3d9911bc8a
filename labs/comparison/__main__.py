"""``python -m labs.comparison``: runs all scenarios, prints the table, fails if one differs.

Each scenario has an expected result for celery-idempotent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from labs.comparison import runner
from labs.comparison.contestants import CONTESTANTS
from labs.comparison.install import install_peers
from labs.comparison.report import MET, MISSED, Report
from labs.comparison.scenario import Cell, Scenario
from labs.comparison.scenarios import SCENARIOS
from tests.servers.redis_server import RedisServer


def main() -> int:
    arguments = _arguments()
    scenarios = [
        scenario for scenario in SCENARIOS if not arguments.only or scenario.name in arguments.only
    ]
    # The table goes to standard output, everything else to standard error.
    stderr = Console(stderr=True)
    install_peers()
    report = _measure(scenarios, stderr)
    for scenario, contestant, cell in report.failures():
        stderr.rule(f"{scenario.name}: {contestant}")
        stderr.print(cell.facts["traceback"], *cell.facts["workers"], sep="\n", markup=False)
    if arguments.json:
        print(report.json())
    elif arguments.markdown:
        print(report.markdown())
    else:
        Console().print(report.table())
    stderr.print(f"{report.summary} ({report.seconds:.0f} s)")
    return 1 if report.missed() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.comparison", description=__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="SCENARIO",
        choices=[scenario.name for scenario in SCENARIOS],
        help="run these scenarios only: " + ", ".join(scenario.name for scenario in SCENARIOS),
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print the details of all results as JSON"
    )
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


def _measure(scenarios: Sequence[Scenario], stderr: Console) -> Report:
    started_at = time.monotonic()
    with (
        RedisServer.start(config={"databases": str(runner.databases(scenarios))}) as server,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
        ) as bars,
    ):
        bar = {
            scenario.name: bars.add_task(f"  {scenario.title}", total=len(CONTESTANTS), start=False)
            for scenario in scenarios
        }

        def show(scenario: Scenario, cells: Mapping[str, Cell]) -> None:
            if not cells:
                bars.start_task(bar[scenario.name])
            elif len(cells) == len(CONTESTANTS):
                mark = MET if scenario.is_met(cells) else MISSED
                bars.update(bar[scenario.name], description=f"{mark} {scenario.title}")
            bars.update(bar[scenario.name], completed=len(cells))

        cells = runner.run(scenarios, server, show)
        server_version = f"{server.flavour} {server.version}"
    return Report(scenarios, cells, server_version, time.monotonic() - started_at)


if __name__ == "__main__":
    sys.exit(main())
