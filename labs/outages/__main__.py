"""``python -m labs.outages``: runs every outage; fails if one breaks a promise."""

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

from labs.outages.deployments import OUTAGES, WithRabbitMQ
from labs.outages.outage import Outage
from labs.outages.report import MET, MISSED, Report, is_met
from labs.outages.run import run
from labs.outages.verdict import Verdict
from tests.servers.rabbitmq import find_rabbitmq
from tests.servers.redis_server import RedisServer

#: A run mostly waits, so several of them run at the same time.
CONCURRENT_RUNS = 2


def main() -> int:
    arguments = _arguments()
    # The table goes to standard output, everything else to standard error.
    stderr = Console(stderr=True)
    outages = [outage for outage in OUTAGES if not arguments.only or outage.name in arguments.only]
    if find_rabbitmq() is None:
        stderr.print("RabbitMQ is not installed: apt-get install rabbitmq-server")
        outages = [outage for outage in outages if outage.deployment is not WithRabbitMQ]
    with tempfile.TemporaryDirectory(prefix="outages-") as temporary:
        folder = Path(arguments.logs or temporary)
        report = _run_all(outages, arguments.messages, folder, stderr)
    if arguments.markdown:
        print(report.markdown())
    else:
        Console().print(report.table())
    missed = ", ".join(outage.name for outage in report.missed())
    stderr.print(f"{f'not as promised: {missed}' if missed else 'as promised'} "
                 f"({report.seconds:.0f} s)")  # fmt: skip
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.outages", description=__doc__)
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="OUTAGE",
        choices=[outage.name for outage in OUTAGES],
        help="run these only: " + ", ".join(outage.name for outage in OUTAGES),
    )
    parser.add_argument("--messages", type=int, default=500, help="per outage; default: 500")
    parser.add_argument("--logs", metavar="FOLDER", help="keep ledgers and worker logs")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


def _run_all(outages: Sequence[Outage], messages: int, folder: Path, stderr: Console) -> Report:
    started_at = time.monotonic()
    with (
        RedisServer.start(config={"databases": "2"}) as server,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
        ) as bars,
        ThreadPoolExecutor(CONCURRENT_RUNS) as pool,
    ):
        url = server.url.rpartition("/")[0]
        settings = {"broker_url": f"{url}/0", "result_backend": f"{url}/1"}
        bar = {
            outage: bars.add_task(f"  {outage.title}", total=messages, start=False)
            for outage in outages
        }

        def run_outage(outage: Outage) -> Verdict:
            bars.start_task(bar[outage])
            show = partial(bars.update, bar[outage])
            verdict = run(outage, messages, settings, folder, lambda done: show(completed=done))
            mark = MET if is_met(outage, verdict) else MISSED
            show(description=f"{mark} {outage.title}")
            bars.stop_task(bar[outage])
            return verdict

        verdicts = dict(zip(outages, pool.map(run_outage, outages), strict=True))
        server_version = f"{server.flavour} {server.version}"
    return Report(verdicts, server_version, time.monotonic() - started_at)


if __name__ == "__main__":
    sys.exit(main())
