"""``python -m labs.outages``: runs every outage; fails if one breaks a promise."""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labs.outages import faults
from labs.outages.outage import OUTAGES, Outage
from labs.outages.run import Verdict, run
from labs.rig.report import MET, MISSED, markdown, setting
from tests.servers.rabbitmq import find_rabbitmq
from tests.servers.redis_server import RedisServer

#: A run mostly waits, so several of them run at the same time.
CONCURRENT_RUNS = 2
HEADINGS = (
    *("outage", "executed", "lost", "executed twice", "results differ", "errors"),
    *("last result after", "postponed (maximum per message)", ""),
)


def main() -> int:
    arguments = _arguments()
    outages = [outage for outage in OUTAGES if not arguments.only or outage.name in arguments.only]
    if find_rabbitmq() is None:
        print("RabbitMQ is not installed: apt-get install rabbitmq-server", file=sys.stderr)
        outages = [outage for outage in outages if outage.start is not faults.with_rabbitmq]
    with (
        tempfile.TemporaryDirectory(prefix="outages-") as temporary,
        RedisServer.start(config={"databases": "2"}) as server,
        ThreadPoolExecutor(CONCURRENT_RUNS) as pool,
    ):
        url, folder = server.url.rpartition("/")[0], Path(arguments.logs or temporary)
        settings = {"broker_url": f"{url}/0", "result_backend": f"{url}/1"}

        def run_outage(outage: Outage) -> Verdict:
            verdict = run(outage, arguments.messages, settings, folder)
            mark = MET if verdict.keeps_promises(outage) else MISSED
            print(mark, outage.title, file=sys.stderr, flush=True)
            return verdict

        verdicts = dict(zip(outages, pool.map(run_outage, outages), strict=True))
    print(setting(), markdown(HEADINGS, [_line(*each) for each in verdicts.items()]), sep="\n\n")
    missed = [each.name for each, verdict in verdicts.items() if not verdict.keeps_promises(each)]
    print(f"not as promised: {missed}" if missed else "as promised", file=sys.stderr)
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m labs.outages", description=__doc__)
    names = [outage.name for outage in OUTAGES]
    parser.add_argument("--only", nargs="+", metavar="OUTAGE", choices=names, help=f"of {names}")
    parser.add_argument("--messages", type=int, default=500, help="per outage; default: 500")
    parser.add_argument("--logs", metavar="FOLDER", help="keep ledgers and worker logs")
    return parser.parse_args()


def _line(outage: Outage, verdict: Verdict) -> list[str]:
    lost = f"{verdict.lost}"
    if verdict.undelivered:
        lost += f" (and {verdict.undelivered} by the broker)"
    executed_twice = f"{verdict.executed_twice}"
    if verdict.executed_twice and outage.may_execute_twice:
        executed_twice += f" ({outage.may_execute_twice})"
    return [
        outage.title,
        f"{verdict.executed}",
        lost,
        executed_twice,
        f"{verdict.differing}",
        f"{verdict.errors}",
        f"{verdict.settled_after:.1f} s",
        f"{verdict.postponed} ({verdict.most_postponed})",
        MET if verdict.keeps_promises(outage) else MISSED,
    ]


if __name__ == "__main__":
    sys.exit(main())
