"""Runs all stages and prints one verdict; exits with 1 if anything failed."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings

from rich.console import Console
from rich.table import Table

from labs.hostile.keys import SERIALIZERS
from labs.hostile.stages import DEPLOYMENTS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="make hostile", description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000, help="calls whose keys are compared")
    parser.add_argument("--messages", type=int, default=20_000, help="calls that are sent twice")
    parser.add_argument("--forged", type=int, default=200, help="messages and records of a forger")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", choices=("keys", "messages", "records", "headers", "forged")
    )
    options = parser.parse_args()
    jobs = [
        *(("records", name, 0) for name in DEPLOYMENTS),
        *(("keys", name, options.keys // len(SERIALIZERS)) for name in SERIALIZERS),
        *(("messages", name, options.messages // len(SERIALIZERS)) for name in SERIALIZERS),
        ("headers", "", 0),
        ("forged", "", options.forged),
    ]
    chosen = [(*job, options.seed) for job in jobs if not options.only or job[0] in options.only]
    console, table, failures = Console(), Table("", "stage", "figures"), []
    with multiprocessing.Pool(2, maxtasksperchild=1) as pool:
        for number, row in enumerate(pool.imap_unordered(run, chosen), 1):
            console.print(f"{number} of {len(chosen)}: {row.stage}", style="dim")
            table.add_row("✗" if row.failures else "✓", row.stage, row.figures)
            failures += [f"{row.stage}: {failure}" for failure in row.failures]
    console.print(table)
    for failure in failures[:50]:
        console.print(failure.encode("ascii", "backslashreplace").decode(), markup=False)
    return bool(failures)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
