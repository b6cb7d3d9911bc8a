"""Whether it matters how many records there are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack

from celery_idempotent.key.key import Key
from tests.labs.benchmarks.bench import FINGERPRINT, TASK, Bench, own_server
from tests.labs.benchmarks.figure import Curves, Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.records import added_by, digest_of, fill
from tests.labs.benchmarks.turns import Rounds, in_turn, median_us

RUN, REPLAY, GET = "begin + complete", "replay of a random one", "plain GET of a random one"
GOALS = {RUN: Goal(1.1), REPLAY: Goal(1.1)}


class Growth(Measure):
    """The same operations on servers with a thousand to five million records, in turn.

    All servers are there at the same time, so that each round has all sizes in it. What a replay
    asks for is drawn at random: its record is in no cache of the processor's. The plain GET tells
    what of that is Redis's own.
    """

    name = "growth"
    title = "time of an operation, by records"
    timeout = 300.0

    SIZES = (1_000, 10_000, 100_000, 1_000_000, 5_000_000)
    ROUNDS, EACH = 30, 100

    def measure(self, show: Show) -> Finding:
        with ExitStack() as stack:
            benches: dict[str, Bench] = {}
            for size in self.SIZES:
                bench = Bench(stack.enter_context(own_server()))
                _filled(bench, size)
                benches[f"{size}"] = bench
                show(0.5 * sum(map(int, benches)) / sum(self.SIZES))
            clients, servers = self._rounds(benches, show)
        least, most = f"{min(self.SIZES)}", f"{max(self.SIZES)}"
        figures = [
            Figure.spread_of(
                f"{what}, {int(most):,} / {int(least):,} records, {where}",
                Spread.of_ratios(times[what][most], times[what][least]),
                "×",
                GOALS.get(what),
            )
            for where, times in (("client's time", clients), ("server's time", servers))
            for what in times
        ]
        return Finding(
            figures,
            [
                _curves("Time of an operation, one client", clients),
                _curves("Time of a script on the server", servers),
            ],
            {"µs": clients, "µs on the server": servers},
        )

    def _rounds(
        self, benches: Mapping[str, Bench], show: Show
    ) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
        """Microseconds by operation and size: of a client's call, and of a script in the server."""
        clients, servers = (
            {what: {size: [] for size in benches} for what in (RUN, REPLAY, GET)} for _ in range(2)
        )
        for number in range(-1, self.ROUNDS):  # the first one warms up
            for size in in_turn(benches, max(number, 0)):
                for what, (of_client, of_server) in self._timed(benches[size], int(size)).items():
                    if number >= 0:
                        clients[what][size].append(of_client)
                        servers[what][size].append(of_server)
            show(0.5 + 0.5 * (number + 1) / self.ROUNDS)
        return clients, servers

    def _timed(self, bench: Bench, size: int) -> dict[str, tuple[float, float]]:
        new = [next(bench.fresh) for _ in range(self.EACH)]
        some, others = ([_key(random.randrange(size)) for _ in range(self.EACH)] for _ in range(2))
        times = {}
        for what, keys, act, command in (
            (RUN, new, bench.run, "evalsha"),
            (REPLAY, some, bench.begin, "evalsha"),
            (GET, others, lambda key: bench.client.get(bench.store.name(key)), "get"),
        ):
            left = iter(keys)
            bench.client.config_resetstat()
            of_client = median_us(lambda act=act, left=left: act(next(left)), self.EACH)
            times[what] = (of_client, bench.usec_per_call(command))
        bench.client.unlink(*map(bench.store.name, new))
        return times


def _filled(bench: Bench, size: int) -> None:
    """Put so many completed records there."""
    template = bench.store.name(bench.run())
    added_by(bench.client, lambda: fill(bench.client, template, size))


def _key(number: int) -> Key:
    return Key(TASK, digest_of(number), FINGERPRINT)


def _curves(title: str, times: Mapping[str, Rounds]) -> Curves:
    curves = {
        what: [(float(size), Spread.of(each)) for size, each in of.items()]
        for what, of in times.items()
    }
    return Curves(title, "µs", "records", curves, powers=True)
