"""The throughput of one Redis server."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Sequence

from celery_idempotent.core.store import scripts
from celery_idempotent.core.store.commands import DEADLINE, Command
from labs.benchmarks.bench import (
    RETENTION_MS,
    TASK,
    Bench,
    begin_command,
    complete_command,
    private_server,
)
from labs.benchmarks.figure import Bars, Figure, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds, round_order
from labs.benchmarks.measure import Measure, MissingDependency, ProgressCallback
from labs.benchmarks.records import fill
from tests.servers.redis_server import RedisServer

#: A deadline that no call reaches.
_FAR_MS = 10**14
#: redis-benchmark replaces it by a random number in each command.
RANDOM_NUMBER = "__rand_int__"
BEGIN, COMPLETE, REPLAY = "begin, key absent", "complete", "replay"
NO_OP, SET_NX = "no-op script", "SET NX PX"
NAMES = (BEGIN, COMPLETE, REPLAY, NO_OP, SET_NX)
#: Prefixes of the records that a command applies to.
ABSENT, RUNNING, COMPLETED = "idem-absent", "idem-running", "idem"


class Throughput(Measure):
    """Operations per second by redis-benchmark, with 50 connections and pipelines of 1 and 16.

    On a machine of two cores, the client uses one of them and the server the other.
    """

    name = "throughput"
    title = "operations per second, one Redis"
    page = "scaling"

    PIPELINES = (1, 16)
    ROUNDS, CALLS, RECORDS = 3, 40_000, 300_000

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
        if program is None:
            raise MissingDependency("redis-benchmark is not installed: apt-get install redis-tools")
        rates: Rounds = {}
        with private_server() as server:
            bench = Bench(server)
            jobs = {_label(name, size): (name, size) for name in NAMES for size in self.PIPELINES}
            rates = {label: [] for label in jobs}
            for number in range(self.ROUNDS):
                calls = self._calls(bench, self._fill(bench))
                progress((number + 0.2) / self.ROUNDS)
                for label in round_order(jobs, number):
                    name, pipeline = jobs[label]
                    rates[label].append(self._rate(program, server, calls[name], pipeline))
                progress((number + 1) / self.ROUNDS)
            version = f"{server.flavour} {server.version}"
        spreads = {name: Spread.from_values(each) for name, each in rates.items()}
        return MeasureResult(
            [Figure.from_spread(name, each, "/s") for name, each in spreads.items()],
            [
                Bars(
                    f"Operations per second, one {version}, pipeline of {size}",
                    "/s",
                    {name: spreads[_label(name, size)] for name in NAMES},
                    (BEGIN, COMPLETE, REPLAY),
                )
                for size in self.PIPELINES
            ],
            {"operations per second": rates},
        )

    def _fill(self, bench: Bench) -> int:
        """Creates completed and started records; returns the token of the started ones."""
        client, store = bench.client, bench.store
        client.flushall()
        fill(client, store.name(bench.run()), self.RECORDS, prefix=COMPLETED)
        running = next(bench.new_keys)
        token = bench.begin_token(running)
        fill(client, store.name(running), self.RECORDS, prefix=RUNNING)
        return token

    def _calls(self, bench: Bench, token: int) -> dict[str, list[str]]:
        """Returns the commands, each for random records."""

        def script(name: str, prefix: str, arguments: Sequence[object]) -> list[str]:
            bench.client.script_load(scripts.load(name).source)
            record_name = f"{prefix}:{TASK}:{RANDOM_NUMBER}0000000000"
            sha = scripts.load(name).sha
            return ["EVALSHA", sha, "1", record_name, *map(str, arguments)]

        key = next(bench.new_keys)
        begin = _printable(begin_command(key))
        result = "x" * 98
        return {
            BEGIN: script("begin", ABSENT, begin),
            COMPLETE: script("settle", RUNNING, _printable(complete_command(key, token))),
            REPLAY: script("begin", COMPLETED, begin),
            NO_OP: ["EVALSHA", bench.no_op_sha, "1", "idem:-"],
            SET_NX: ["SET", f"nx:{TASK}:{RANDOM_NUMBER}", result, "NX", "PX", str(RETENTION_MS)],
        }

    def _rate(self, program: str, server: RedisServer, call: Sequence[str], pipeline: int) -> float:
        options = ["-p", str(server.port), "-c", "50", "-P", str(pipeline), "-n", str(self.CALLS)]
        process = subprocess.run(
            [program, *options, "-r", str(self.RECORDS), "--csv", *call],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        *_, line = csv.reader(process.stdout.splitlines())
        return float(line[1])


def _label(name: str, pipeline: int) -> str:
    return f"{name}, pipeline of {pipeline}"


def _printable(command: Command) -> list[str]:
    """Returns the arguments, with binary ones replaced by text of the same length."""
    arguments = (_FAR_MS if arg is DEADLINE else arg for arg in command.arguments)
    encoded = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in arguments]
    return [
        arg.decode() if arg.isascii() and arg.decode().isprintable() else "x" * len(arg)
        for arg in encoded
    ]
