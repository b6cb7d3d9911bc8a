"""What one Redis core carries."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Sequence

from celery_idempotent.store import scripts
from celery_idempotent.store.commands import Command
from celery_idempotent.testing.server import RedisServer
from tests.labs.benchmarks.bench import RETENTION_MS, TASK, Bench, beginning, completing, own_server
from tests.labs.benchmarks.figure import Bars, Figure, Finding, Spread
from tests.labs.benchmarks.measure import Measure, Missing, Show
from tests.labs.benchmarks.records import fill
from tests.labs.benchmarks.turns import Rounds, in_turn

#: Of redis-benchmark; it draws a number for each command.
ANY = "__rand_int__"
BEGIN, COMPLETE, REPLAY = "begin, key absent", "complete", "replay"
NO_OP, SET_NX = "no-op script", "SET NX PX"
NAMES = (BEGIN, COMPLETE, REPLAY, NO_OP, SET_NX)
ABSENT, RUNNING, DONE = "idem-absent", "idem-running", "idem"


class Throughput(Measure):
    """Operations a second by redis-benchmark: 50 connections, one command at a time or sixteen.

    Where client and server share two cores, the server has one of them.
    """

    name = "throughput"
    title = "operations a second, one Redis"
    page = "scaling"

    PIPELINES = (1, 16)
    ROUNDS, CALLS, RECORDS = 3, 40_000, 300_000

    def measure(self, show: Show) -> Finding:
        program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
        if program is None:
            raise Missing("no redis-benchmark here: apt-get install redis-tools")
        rates: Rounds = {}
        with own_server() as server:
            bench = Bench(server)
            jobs = {_job(name, at): (name, at) for name in NAMES for at in self.PIPELINES}
            rates = {job: [] for job in jobs}
            for number in range(self.ROUNDS):
                calls = self._calls(bench, self._fill(bench))
                show((number + 0.2) / self.ROUNDS)
                for job in in_turn(jobs, number):
                    name, at_a_time = jobs[job]
                    rates[job].append(self._rate(program, server, calls[name], at_a_time))
                show((number + 1) / self.ROUNDS)
            told = f"{server.flavour} {server.version}"
        spreads = {name: Spread.of(each) for name, each in rates.items()}
        return Finding(
            [Figure.spread_of(name, each, "/s") for name, each in spreads.items()],
            [
                Bars(
                    f"Operations a second, one {told}, {at} at a time",
                    "/s",
                    {name: spreads[_job(name, at)] for name in NAMES},
                    (BEGIN, COMPLETE, REPLAY),
                )
                for at in self.PIPELINES
            ],
            {"operations a second": rates},
        )

    def _fill(self, bench: Bench) -> int:
        """Completed records, and as many that run; gives the token of all these."""
        client, store = bench.client, bench.store
        client.flushall()
        fill(client, store.name(bench.run()), self.RECORDS, prefix=DONE)
        running = next(bench.fresh)
        token = bench.begun(running)
        fill(client, store.name(running), self.RECORDS, prefix=RUNNING)
        return token

    def _calls(self, bench: Bench, token: int) -> dict[str, list[str]]:
        """Commands, each on a record that is drawn at random."""

        def script(name: str, prefix: str, arguments: Sequence[object]) -> list[str]:
            bench.client.script_load(scripts.load(name).source)
            place = f"{prefix}:{TASK}:{ANY}0000000000"
            return ["EVALSHA", scripts.load(name).sha, "1", place, *map(str, arguments)]

        key = next(bench.fresh)
        begin = _printable(beginning(key))
        result = "x" * 98
        return {
            BEGIN: script("begin", ABSENT, begin),
            COMPLETE: script("complete", RUNNING, _printable(completing(key, token))),
            REPLAY: script("begin", DONE, begin),
            NO_OP: ["EVALSHA", bench.no_op_sha, "1", "idem:-"],
            SET_NX: ["SET", f"nx:{TASK}:{ANY}", result, "NX", "PX", str(RETENTION_MS)],
        }

    def _rate(
        self, program: str, server: RedisServer, call: Sequence[str], at_a_time: int
    ) -> float:
        where = ["-p", str(server.port), "-c", "50", "-P", str(at_a_time), "-n", str(self.CALLS)]
        done = subprocess.run(
            [program, *where, "-r", str(self.RECORDS), "--csv", *call],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        *_, line = csv.reader(done.stdout.splitlines())
        return float(line[1])


def _job(name: str, at_a_time: int) -> str:
    return f"{name}, {at_a_time} at a time"


def _printable(command: Command) -> list[str]:
    """The arguments, each as long as it is, and such that a command line can carry them."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command.arguments]
    return [
        word.decode() if word.isascii() and word.decode().isprintable() else "x" * len(word)
        for word in words
    ]
