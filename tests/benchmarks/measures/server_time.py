"""Time on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from celery_idempotent.key.key import Key
from celery_idempotent.testing.kinds import External, find_servers
from tests.benchmarks.bench import RETENTION_MS, Bench, own_server, result_of
from tests.benchmarks.figure import Figure, Finding, Goal, Spread
from tests.benchmarks.measure import Measure, Show
from tests.benchmarks.turns import in_turn

BEGIN, COMPLETE, REPLAY = "begin, key absent", "complete", "replay"
NO_OP, SET_NX = "no-op script", "SET NX PX"
GOALS = {BEGIN: Goal(8), COMPLETE: Goal(8), REPLAY: Goal(4)}


class ServerTime(Measure):
    """Microseconds that each script takes of the server, by ``INFO commandstats``.

    One client, one command at a time. The yardstick is a SET NX in the same rounds: what it
    takes says how fast this machine is.
    """

    name = "server"
    title = "server time"

    ROUNDS, EACH = 15, 300

    def measure(self, show: Show) -> Finding:
        kinds = [kind for kind, found in find_servers().items() if not isinstance(found, External)]
        figures: list[Figure] = []
        raw = {}
        for number, kind in enumerate(kinds):
            with own_server(kind) as server:
                times = server_times(
                    Bench(server), self.ROUNDS, self.EACH,
                    lambda done, at=number: show((at + done) / len(kinds)),
                )  # fmt: skip
                told = f"{server.flavour} {server.version}"
            raw[told] = times
            # The first one is what everything else here is measured on.
            goals = GOALS if number == 0 else {}
            figures += [
                Figure.spread_of(f"{told}: {name}", Spread.of(each), "µs", goals.get(name))
                for name, each in times.items()
            ]
        return Finding(figures, raw={"means of rounds, µs": raw})


def server_times(bench: Bench, rounds: int, each: int, show: Show) -> dict[str, list[float]]:
    """Mean microseconds a call in each round, by what was called."""
    finished = [bench.run() for _ in range(each)]
    times: dict[str, list[float]] = {name: [] for name in (BEGIN, COMPLETE, REPLAY, NO_OP, SET_NX)}
    for number in range(rounds):
        for name in in_turn(times, number):
            with _batch(bench, name, finished) as calls:
                bench.client.config_resetstat()
                for call in calls:
                    call()
                times[name].append(bench.usec_per_call("set" if name == SET_NX else "evalsha"))
        show((number + 1) / rounds)
    return times


@contextmanager
def _batch(
    bench: Bench, name: str, finished: Sequence[Key]
) -> Iterator[list[Callable[[], object]]]:
    """Calls of one kind, all that they need made before."""
    each = len(finished)
    fresh = [next(bench.fresh) for _ in range(each)]
    names = [bench.store.name(key) for key in fresh]
    value = b"x" * 100
    if name == BEGIN:
        yield [lambda key=key: bench.begin(key) for key in fresh]
    elif name == COMPLETE:
        tokens = [bench.begun(key) for key in fresh]
        result = result_of(100)
        yield [
            lambda key=key, token=token: bench.complete(key, token, result)
            for key, token in zip(fresh, tokens, strict=True)
        ]
    elif name == REPLAY:
        yield [lambda key=key: bench.begin(key) for key in finished]
        return
    elif name == NO_OP:
        yield [bench.no_op_on_line] * each
        return
    else:
        yield [
            lambda name=name: bench.client.set(name, value, nx=True, px=RETENTION_MS)
            for name in names
        ]
    bench.client.unlink(*names)
