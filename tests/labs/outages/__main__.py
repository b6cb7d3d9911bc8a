"""``python -m tests.labs.outages``: live through every outage; fail if one is not as promised."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_idempotent.testing.server import RedisServer
from tests.labs.outages.discovery import OUTAGES, BesideRabbitMQ
from tests.labs.outages.outage import Outage
from tests.labs.outages.report import MET, MISSED, Report, is_met
from tests.labs.outages.run import run
from tests.labs.outages.verdict import Disposition
from tests.servers.rabbitmq import find_rabbitmq

#: Runs under way at a time: they wait half of theirs.
AT_A_TIME = 2


def main() -> int:
    wanted = _arguments()
    # What is asked for goes to standard output, and everything else beside it.
    beside = Console(stderr=True)
    outages = [outage for outage in OUTAGES if not wanted.only or outage.name in wanted.only]
    if find_rabbitmq() is None:
        beside.print("no RabbitMQ here: apt-get install rabbitmq-server")
        outages = [outage for outage in outages if outage.stage is not BesideRabbitMQ]
    with tempfile.TemporaryDirectory(prefix="outages-") as temporary:
        folder = Path(wanted.logs or temporary)
        report = _run_all(outages, wanted.messages, folder, beside)
    if wanted.markdown:
        print(report.markdown())
    else:
        Console().print(report.table())
    missed = ", ".join(outage.name for outage in report.missed())
    beside.print(f"{f'not as promised: {missed}' if missed else 'as promised'} "
                 f"({report.seconds:.0f} s)")  # fmt: skip
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.outages", description=__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="OUTAGE",
        choices=[outage.name for outage in OUTAGES],
        help="these alone: " + ", ".join(outage.name for outage in OUTAGES),
    )
    parser.add_argument("--messages", type=int, default=500, help="in each; 500 by default")
    parser.add_argument("--logs", metavar="FOLDER", help="keep ledgers and workers' logs there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


def _run_all(outages: Sequence[Outage], messages: int, folder: Path, beside: Console) -> Report:
    began_at = time.monotonic()
    with (
        RedisServer.start(config={"databases": "2"}) as server,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=beside,
        ) as bars,
        ThreadPoolExecutor(AT_A_TIME) as pool,
    ):
        url = server.url.rpartition("/")[0]
        settings = {"broker_url": f"{url}/0", "result_backend": f"{url}/1"}
        bar = {
            outage: bars.add_task(f"  {outage.title}", total=messages, start=False)
            for outage in outages
        }

        def live_through(outage: Outage) -> Disposition:
            bars.start_task(bar[outage])
            show = partial(bars.update, bar[outage])
            verdict = run(outage, messages, settings, folder, lambda n: show(completed=n))
            mark = MET if is_met(outage, verdict) else MISSED
            show(description=f"{mark} {outage.title}")
            bars.stop_task(bar[outage])
            return verdict

        verdicts = dict(zip(outages, pool.map(live_through, outages), strict=True))
        told = f"{server.flavour} {server.version}"
    return Report(verdicts, told, time.monotonic() - began_at)


if __name__ == "__main__":
    sys.exit(main())
