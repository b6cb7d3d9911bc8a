"""Time on the server."""

from __future__ import annotations

from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.testing.discovery import External, find_servers
from tests.labs.benchmarks.bench import (
    LEASE_MS,
    RETENTION_MS,
    Bench,
    beginning,
    completing,
    own_server,
)
from tests.labs.benchmarks.figure import Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Rounds, in_turn

BEGIN, COMPLETE, REPLAY, EXTEND = "begin, key absent", "complete", "replay", "extend"
NO_OP, SET_NX = "no-op script", "SET NX PX"
NAMES = (BEGIN, COMPLETE, REPLAY, EXTEND, NO_OP, SET_NX)
GOALS = {BEGIN: Goal(8), COMPLETE: Goal(8), REPLAY: Goal(4)}
TOGETHER = "in one pipeline"


class ServerTime(Measure):
    """Microseconds that each script takes of the server, by ``INFO commandstats``.

    One client, one command at a time; then the same in one pipeline, where the processor's caches
    have the script and its data. The yardstick is a SET NX of 100 bytes in the same rounds: what it
    takes says how fast this machine is.
    """

    name = "server"
    title = "server time"

    #: Of the server that all else is measured on, and of each other kind.
    ROUNDS, ROUNDS_OF_OTHERS, EACH = 15, 5, 200

    def measure(self, show: Show) -> Finding:
        discovery = [
            kind for kind, found in find_servers().items() if not isinstance(found, External)
        ]
        figures: list[Figure] = []
        raw = {}
        for number, kind in enumerate(discovery):
            with own_server(kind) as server:
                rounds = self.ROUNDS if number == 0 else self.ROUNDS_OF_OTHERS
                times = self._rounds(Bench(server), rounds)
                told = f"{server.flavour} {server.version}"
            show((number + 1) / len(discovery))
            raw[told] = times
            goals = GOALS if number == 0 else {}
            figures += [
                Figure.spread_of(f"{told}: {name}", Spread.of(each), "µs", goals.get(name))
                for name, each in times.items()
            ]
        return Finding(figures, raw={"means of rounds, µs": raw})

    def _rounds(self, bench: Bench, rounds: int) -> Rounds:
        """Mean microseconds a call in each round, by what was called."""
        ways = {name: (name, False) for name in NAMES}
        ways |= {f"{name}, {TOGETHER}": (name, True) for name in NAMES}
        times: Rounds = {way: [] for way in ways}
        for number in range(rounds):
            for way in in_turn(ways, number):
                times[way].append(_usec(bench, *ways[way], self.EACH))
        return times


def _usec(bench: Bench, name: str, together: bool, each: int) -> float:
    """Mean microseconds that the server spends in each of so many calls."""
    if name in (NO_OP, SET_NX):
        return _usec_of_yardstick(bench, name, together, each)
    asks = _asks(bench, name, each)
    bench.client.config_resetstat()
    if together:
        bench.store.execute_all(asks)
    else:
        for ask in asks:
            bench.store.execute(ask)
    usec = bench.usec_per_call()
    bench.client.unlink(*(bench.store.name(ask.key) for ask in asks))
    return usec


def _asks(bench: Bench, name: str, each: int) -> list[Command]:
    """What is asked, with all that it needs made before."""
    keys = [next(bench.fresh) for _ in range(each)]
    if name == BEGIN:
        return [beginning(key) for key in keys]
    if name == REPLAY:
        return [beginning(bench.run(key)) for key in keys]
    tokens = {key: bench.begun(key) for key in keys}
    if name == COMPLETE:
        return [completing(key, token) for key, token in tokens.items()]
    return [
        commands.extend(Extension(key, token, LEASE_MS, RETENTION_MS))
        for key, token in tokens.items()
    ]


def _usec_of_yardstick(bench: Bench, name: str, together: bool, each: int) -> float:
    names = [bench.store.name(next(bench.fresh)) for _ in range(each)]
    value = b"x" * 100
    pipeline = bench.client.pipeline(transaction=False)
    to = pipeline if together else bench.client
    bench.client.config_resetstat()
    for place in names:
        if name == SET_NX:
            to.set(place, value, nx=True, px=RETENTION_MS)
        else:
            to.evalsha(bench.no_op_sha, 1, "idem:-")
    pipeline.execute()
    usec = bench.usec_per_call("set" if name == SET_NX else "evalsha")
    bench.client.unlink(*names)
    return usec
