"""``python -m tests.labs.chaos``: faults by schedule; fails if a promise is broken."""

from __future__ import annotations

import argparse
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

from celery_idempotent.testing.server import RedisServer
from tests.labs.chaos import audit, picture, runner, schedule
from tests.labs.chaos.report import MET, MISSED, Report
from tests.labs.chaos.runner import Entry
from tests.labs.chaos.verdict import Disposition
from tests.labs.comparison.contestants import CONTESTANTS, OURS
from tests.servers.rabbitmq import find_rabbitmq

SEEDS = 20
#: Six in a row have every combination of broker and store.
SEEDS_FOR_PEERS = 6
TASKS = 1000
#: Letters that tables need, at the least.
WIDTH = 132
#: Everything that runs leave, and the picture.
FOLDER = Path(".chaos")


def main() -> int:
    asked = _arguments()
    # What is asked for goes to standard output, and everything else beside it.
    beside = Console(stderr=True)
    show = print if asked.markdown else Console(width=max(WIDTH, beside.width)).print
    audited = audit.run(FOLDER, beside) if asked.audit or asked.seed is None else None
    if audited is not None:
        show(audited.markdown() if asked.markdown else audited.table())
    if asked.audit:
        return 0 if audited is not None and audited.as_told else 1
    entries = _entries(asked, beside)
    report, broken = _run(entries, beside)
    for shown in [report.markdown()] if asked.markdown else report.tables():
        show(shown)
    if (seen := report.telling()) is not None:
        drawn = picture.draw(seen, asked.tasks, FOLDER)
        beside.print(f"{drawn} shows seed {seen}; the evidence of each run is beside it")
    for verdict in report.faulty():
        beside.print(f"{MISSED} seed {verdict.seed}:", *verdict.notes, sep="\n  ", markup=False)
        again = Entry(verdict.seed, OURS.name, asked.tasks).replay
        beside.print(f"  again: {again}", markup=False)
    # Others may hang, and nobody has promised anything for them.
    hung = [entry for entry in broken if entry.contestant == OURS.name]
    wrong = bool(report.faulty() or hung or (audited is not None and not audited.as_told))
    beside.print(f"{'not ' if wrong else ''}as promised ({report.seconds:.0f} s)")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"so many; {SEEDS} by default")
    parser.add_argument("--first", type=int, default=1, help="the first of them; 1 by default")
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"in each; {TASKS} by default")
    parser.add_argument("--ours", action="store_true", help=f"{OURS.name} alone")
    peers = f"the first so many for the others; {SEEDS_FOR_PEERS} by default"
    parser.add_argument("--peers", type=int, default=SEEDS_FOR_PEERS, metavar="SEEDS", help=peers)
    parser.add_argument("--audit", action="store_true", help="the audit of time alone")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return parser.parse_args()


def _entries(asked: argparse.Namespace, beside: Console) -> list[Entry]:
    last = asked.first + asked.seeds
    seeds = [asked.seed] if asked.seed is not None else list(range(asked.first, last))
    if find_rabbitmq() is None:
        beside.print("no RabbitMQ here, its seeds are left out: apt-get install rabbitmq-server")
        seeds = [s for s in seeds if schedule.make(s, 2).shape.broker != "rabbitmq"]
    # Ours first: whoever looks for a fault of ours has not to wait for the others.
    entries = [Entry(seed, OURS.name, asked.tasks) for seed in seeds]
    others = [each.name for each in CONTESTANTS if each is not OURS and not asked.ours]
    entries += [Entry(seed, name, asked.tasks) for seed in seeds[: asked.peers] for name in others]
    return entries


def _run(entries: list[Entry], beside: Console) -> tuple[Report, list[Entry]]:
    began_at = time.monotonic()
    verdicts: list[Disposition] = []
    broken: list[Entry] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=beside,
    ) as bars:
        whole = bars.add_task("runs", total=len(entries))
        bar_of: dict[Entry, TaskID] = {}

        def progress(entry: Entry) -> runner.Progress:
            title = f"seed {entry.seed}, {entry.contestant}: {entry.planned.shape}"
            bar = bar_of[entry] = bars.add_task(title, total=len(entry.planned.calls))
            return lambda begin_replied: bars.update(bar, completed=begin_replied)

        for entry, verdict in runner.run_all(entries, FOLDER, progress):
            bars.remove_task(bar_of[entry])
            bars.advance(whole)
            if not isinstance(verdict, Disposition):
                beside.print(f"{MISSED} {verdict}", markup=False)
                broken.append(entry)
                continue
            verdicts.append(verdict)
            mark = MET if verdict.faultless else MISSED
            told = (
                f"{mark} seed {entry.seed}, {entry.contestant}: {verdict.calls} calls, "
                f"{verdict.faults} faults, {verdict.lost} lost, {verdict.doubled_orders} doubled, "
                f"{verdict.differing} differ"
            )
            beside.print(told, markup=False)
    with RedisServer.start() as server:
        told = f"{server.flavour} {server.version}"
    return Report(verdicts, told, time.monotonic() - began_at), broken


if __name__ == "__main__":
    sys.exit(main())
