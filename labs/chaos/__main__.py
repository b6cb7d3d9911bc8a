"""``python -m labs.chaos``: runs schedules of faults; fails if a promise is broken."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from labs.chaos import runner, schedule
from labs.chaos.report import Report
from labs.chaos.runner import REPOSITORY, RunSpec
from labs.chaos.verdict import Verdict
from labs.comparison.contestants import CONTESTANTS, OURS
from labs.comparison.install import install_peers
from labs.rig.report import MET, MISSED
from tests.packaging.versions.library import Library, install_commit
from tests.servers.rabbitmq import find_rabbitmq
from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import find_postgres

SEEDS = 20
#: Six consecutive seeds have every combination of broker and store.
SEEDS_FOR_PEERS = 6
TASKS = 1000
#: The evidence of all runs.
FOLDER = Path(".chaos")


def main() -> int:
    arguments = _arguments()
    # Tables go to standard output, everything else to standard error.
    stderr = Console(stderr=True)
    if arguments.saved:
        report, failures = _saved(), []
    else:
        report, failures = _run(_entries(arguments, stderr), stderr)
    print(report.markdown())
    stderr.print(f"the evidence of each run is in {FOLDER}")
    for verdict in report.broken_promises():
        stderr.print(f"{MISSED} seed {verdict.seed}:", *verdict.notes, sep="\n  ", markup=False)
        spec = RunSpec(
            verdict.seed, OURS.name, arguments.tasks, verdict.transaction, arguments.previous
        )
        stderr.print(f"  repeat with: {spec.command}", markup=False)
    # Runs of the other contestants may fail.
    our_failures = [spec for spec in failures if spec.contestant == OURS.name]
    failed = bool(report.broken_promises() or our_failures)
    stderr.print(f"{'not ' if failed else ''}as promised ({report.seconds:.0f} s)")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"number of seeds; default: {SEEDS}"
    )
    parser.add_argument("--first", type=int, default=1, help="first seed; default: 1")
    parser.add_argument(
        "--tasks", type=int, default=TASKS, help=f"calls per seed; default: {TASKS}"
    )
    parser.add_argument("--ours", action="store_true", help=f"run {OURS.name} only")
    parser.add_argument(
        "--transaction", action="store_true", help="run the variant with effects in a database only"
    )
    peers = f"number of seeds for the other contestants; default: {SEEDS_FOR_PEERS}"
    parser.add_argument("--peers", type=int, default=SEEDS_FOR_PEERS, metavar="SEEDS", help=peers)
    old = "also run workers of that commit, roll forward to this version, and roll back"
    parser.add_argument("--old", metavar="COMMIT", help=old)
    saved = f"print the tables of the runs whose evidence is in {FOLDER}"
    parser.add_argument("--saved", action="store_true", help=saved)
    arguments = parser.parse_args()
    arguments.previous = None
    if arguments.old:
        folder = FOLDER / "previous"
        shutil.rmtree(folder, ignore_errors=True)
        arguments.previous = install_commit(arguments.old, arguments.old, folder.absolute())
        formats = [each.formats() for each in (arguments.previous, Library("this", REPOSITORY))]
        if formats[0] != formats[1]:
            parser.error(f"{arguments.old} has another layout of records or keys: {formats}")
    return arguments


def _entries(arguments: argparse.Namespace, stderr: Console) -> list[RunSpec]:
    last = arguments.first + arguments.seeds
    seeds = [arguments.seed] if arguments.seed is not None else list(range(arguments.first, last))
    if find_rabbitmq() is None:
        stderr.print(
            "RabbitMQ is not installed, its seeds are skipped: apt-get install rabbitmq-server"
        )
        seeds = [s for s in seeds if schedule.make(s, 2).shape.broker != "rabbitmq"]
    if arguments.previous:
        return [RunSpec(s, OURS.name, arguments.tasks, previous=arguments.previous) for s in seeds]
    transaction = find_postgres() is not None
    if not transaction:
        stderr.print(
            "PostgreSQL is not installed, its runs are skipped: apt-get install postgresql"
        )
    # celery-idempotent first, so that its failures show early.
    variants = [True] if arguments.transaction else [False, True]
    specs = [
        RunSpec(seed, OURS.name, arguments.tasks, variant)
        for variant in variants
        for seed in seeds
        if transaction or not variant
    ]
    if arguments.ours or arguments.transaction:
        return specs
    install_peers()
    others = [
        each.name for each in CONTESTANTS if each is not OURS and "chaos" not in each.not_applicable
    ]
    specs += [
        RunSpec(seed, name, arguments.tasks) for seed in seeds[: arguments.peers] for name in others
    ]
    return specs


def _saved() -> Report:
    files = sorted(FOLDER.glob("seed-*/verdict.json"))
    verdicts = [Verdict(**json.loads(path.read_text())) for path in files]
    return Report(verdicts, _server_version(), sum(each.seconds for each in verdicts))


def _server_version() -> str:
    with RedisServer.start() as server:
        return f"{server.flavour} {server.version}"


def _run(specs: list[RunSpec], stderr: Console) -> tuple[Report, list[RunSpec]]:
    started_at = time.monotonic()
    verdicts: list[Verdict] = []
    failures: list[RunSpec] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr,
    ) as bars:
        total = bars.add_task("runs", total=len(specs))
        bar_of: dict[RunSpec, TaskID] = {}

        def progress(spec: RunSpec) -> runner.Progress:
            title = f"seed {spec.seed}, {spec.title}: {spec.schedule.shape}"
            bar = bar_of[spec] = bars.add_task(title, total=len(spec.schedule.calls))
            return lambda answered: bars.update(bar, completed=answered)

        for spec, verdict in runner.run_all(specs, FOLDER, progress):
            bars.remove_task(bar_of[spec])
            bars.advance(total)
            if not isinstance(verdict, Verdict):
                stderr.print(f"{MISSED} {verdict}", markup=False)
                failures.append(spec)
                continue
            verdicts.append(verdict)
            mark = MET if verdict.keeps_promises else MISSED
            line = (
                f"{mark} seed {spec.seed}, {spec.title}: {verdict.calls} calls, "
                f"{verdict.faults} faults, {verdict.lost} lost, "
                f"{verdict.orders_with_duplicates} duplicate effects, "
                f"{verdict.differing} differ"
            )
            stderr.print(line, markup=False)
    return Report(verdicts, _server_version(), time.monotonic() - started_at), failures


if __name__ == "__main__":
    sys.exit(main())
