"""``make chaos``: runs schedules of faults; fails if a promise is broken."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from labs.chaos import runner, schedule
from labs.chaos.report import Report
from labs.chaos.run import RunSpec
from labs.chaos.verdict import Verdict
from labs.comparison.contestants import CONTESTANTS, OURS
from labs.comparison.install import install_peers
from labs.rig.report import MET, MISSED
from tests.packaging.versions.library import Library, install_commit
from tests.servers.rabbitmq import find_rabbitmq
from tests.servers.sql_server import find_postgres
from tests.worker.harness import REPOSITORY

#: Six consecutive seeds have every combination of broker and store.
SEEDS, SEEDS_FOR_PEERS, TASKS = 20, 6, 1000
#: The evidence of all runs.
FOLDER = Path(".chaos")


def main() -> int:
    specs = _specs(_arguments())
    verdicts: list[Verdict] = []
    failed = False
    # Tables go to standard output, everything else to standard error.
    for spec, verdict in runner.run_all(specs, FOLDER):
        if isinstance(verdict, Verdict):
            verdicts.append(verdict)
            line = (
                f"{verdict.calls} calls, {verdict.faults} faults, {verdict.lost} lost, "
                f"{verdict.orders_with_duplicates} duplicate effects, {verdict.differing} differ"
            )
            mark, notes = (MET, []) if verdict.keeps_promises else (MISSED, [*verdict.notes])
        else:
            line, mark, notes = f"{verdict}", MISSED, []
        title = f"{mark} seed {spec.seed}, {spec.title}, {spec.schedule.shape}: {line}"
        print(title, file=sys.stderr, flush=True)
        # Runs of the other contestants may fail.
        if mark == MISSED and spec.is_ours:
            failed = True
            print(*notes, f"repeat with: {spec.command}", sep="\n  ", file=sys.stderr)
    print(Report(verdicts).markdown())
    print(f"{'not ' if failed else ''}as promised; evidence is in {FOLDER}", file=sys.stderr)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--tasks", type=int, default=TASKS, help="calls per seed")
    parser.add_argument("--ours", action="store_true", help=f"run {OURS.name} only")
    transaction = "run the variant with effects in a database only"
    parser.add_argument("--transaction", action="store_true", help=transaction)
    peers = f"number of seeds for the other contestants; default: {SEEDS_FOR_PEERS}"
    parser.add_argument("--peers", type=int, default=SEEDS_FOR_PEERS, metavar="SEEDS", help=peers)
    old = "also run workers of that commit, roll forward to this version, and roll back"
    parser.add_argument("--old", metavar="COMMIT", help=old)
    arguments = parser.parse_args()
    if arguments.old:
        folder = FOLDER / "previous"
        shutil.rmtree(folder, ignore_errors=True)
        previous = install_commit(arguments.old, arguments.old, folder.absolute())
        formats = [each.formats() for each in (previous, Library("this", REPOSITORY))]
        if formats[0] != formats[1]:
            parser.error(f"{arguments.old} has another layout of records or keys: {formats}")
        arguments.old = previous.name, str(previous.folder)
    return arguments


def _specs(arguments: argparse.Namespace) -> list[RunSpec]:
    seeds, tasks = range(1, 1 + arguments.seeds), arguments.tasks
    seeds = seeds if arguments.seed is None else [arguments.seed]
    if find_rabbitmq() is None:
        print("without RabbitMQ, its seeds are skipped: apt-get install rabbitmq-server")
        seeds = [seed for seed in seeds if schedule.make(seed, 2).shape.broker != "rabbitmq"]
    if arguments.old:
        return [RunSpec(seed, OURS.name, tasks, previous=arguments.old) for seed in seeds]
    # celery-idempotent first, so that its failures show early.
    specs = [] if arguments.transaction else [RunSpec(seed, OURS.name, tasks) for seed in seeds]
    if find_postgres() is None:
        print("without PostgreSQL, its runs are skipped: apt-get install postgresql")
    else:
        specs += [RunSpec(seed, OURS.name, tasks, transaction=True) for seed in seeds]
    if arguments.ours or arguments.transaction:
        return specs
    install_peers()
    others = [each.name for each in CONTESTANTS if each is not OURS]
    peers = [RunSpec(seed, name, tasks) for seed in seeds[: arguments.peers] for name in others]
    return [*specs, *peers]


if __name__ == "__main__":
    sys.exit(main())
