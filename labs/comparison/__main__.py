"""``make peers``: runs all scenarios, prints the table, fails if one differs.

Each scenario has an expected result for celery-idempotent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from labs.comparison.contestants import CONTESTANTS
from labs.comparison.environment import DATABASES_EACH
from labs.comparison.install import install_peers
from labs.comparison.runner import Cells, run
from labs.comparison.scenarios import SCENARIOS, Scenario
from labs.rig.report import MET, MISSED, markdown, setting
from tests.servers.redis_server import RedisServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="make peers", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", choices=names, help=f"of {names}")
    only = parser.parse_args().only
    scenarios = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    install_peers()
    databases = f"{1 + len(scenarios) * len(CONTESTANTS) * DATABASES_EACH}"
    with RedisServer.start(config={"databases": databases}) as server:
        cells = run(scenarios, server.url)
    print(setting(), table(scenarios, cells), sep="\n\n")
    missed = [each.name for each in scenarios if not each.is_met(cells[each.name])]
    print(f"not as expected: {missed}" if missed else "as expected", file=sys.stderr)
    return 1 if missed else 0


def table(scenarios: Sequence[Scenario], cells: Cells) -> str:
    """Returns the table as Markdown."""
    headings = ["", *(f"{each.name} {each.version}" for each in CONTESTANTS), "expected", ""]
    lines = [
        [
            scenario.title,
            *(cells[scenario.name][each.name].text for each in CONTESTANTS),
            scenario.expected,
            MET if scenario.is_met(cells[scenario.name]) else MISSED,
        ]
        for scenario in scenarios
    ]
    return markdown(headings, lines)


if __name__ == "__main__":
    sys.exit(main())
