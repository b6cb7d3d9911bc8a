"""The duration of operations by the number of records."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack

from celery_idempotent.core.key.key import Key
from labs.benchmarks.bench import FINGERPRINT, TASK, Bench, private_server
from labs.benchmarks.figure import Curves, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds, median_microseconds, round_order
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.records import added_memory, digest_of, fill

RUN, REPLAY, GET = "begin + complete", "replay of a random record", "GET of a random record"
#: For the client's time, and for the server's divided by a GET's, which also grows.
GOALS = {RUN: Goal(1.1), REPLAY: Goal(1.1)}


class Growth(Measure):
    """The same operations on servers with a thousand to five million records.

    All servers run at the same time, so that each round includes every size. Replays read random
    records, which are in no cache of the processor. A plain GET shows which part of the difference
    is due to Redis itself.
    """

    name = "growth"
    title = "duration by number of records"
    timeout = 300.0

    SIZES = (1_000, 10_000, 100_000, 1_000_000, 5_000_000)
    ROUNDS, EACH = 30, 100

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with ExitStack() as stack:
            benches: dict[str, Bench] = {}
            for size in self.SIZES:
                bench = Bench(stack.enter_context(private_server()))
                _fill(bench, size)
                benches[f"{size}"] = bench
                progress(0.5 * sum(map(int, benches)) / sum(self.SIZES))
            clients, servers = self._rounds(benches, progress)
        least, most = f"{min(self.SIZES)}", f"{max(self.SIZES)}"
        figures = [
            Figure.from_spread(
                f"{operation}, {int(most):,} / {int(least):,} records, {clock}",
                Spread.from_ratios(times[operation][most], times[operation][least]),
                "×",
                goals.get(operation),
            )
            for clock, times, goals in (
                ("client time", clients, GOALS),
                ("server time", servers, {}),
            )
            for operation in times
        ]
        growth = {
            operation: [
                large / small for large, small in zip(sizes[most], sizes[least], strict=True)
            ]
            for operation, sizes in servers.items()
        }
        figures += [
            Figure.from_spread(
                f"{operation}, server time, growth / growth of {GET}",
                Spread.from_ratios(growth[operation], growth[GET]),
                "×",
                goal,
            )
            for operation, goal in GOALS.items()
        ]
        return MeasureResult(
            figures,
            [
                _curves("Duration of an operation, one client", clients),
                _curves("Server time of a command", servers),
            ],
            {"µs": clients, "µs on the server": servers},
        )

    def _rounds(
        self, benches: Mapping[str, Bench], progress: ProgressCallback
    ) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
        """Returns client and server microseconds, by operation and size."""
        clients, servers = (
            {operation: {size: [] for size in benches} for operation in (RUN, REPLAY, GET)}
            for _ in range(2)
        )
        for number in range(-1, self.ROUNDS):  # round -1 is a warm-up
            for size in round_order(benches, max(number, 0)):
                for operation, (client, server) in self._time(benches[size], int(size)).items():
                    if number >= 0:
                        clients[operation][size].append(client)
                        servers[operation][size].append(server)
            progress(0.5 + 0.5 * (number + 1) / self.ROUNDS)
        return clients, servers

    def _time(self, bench: Bench, size: int) -> dict[str, tuple[float, float]]:
        new = [next(bench.new_keys) for _ in range(self.EACH)]
        replayed, read = (
            [_key(random.randrange(size)) for _ in range(self.EACH)] for _ in range(2)
        )
        times = {}
        for operation, keys, call, command in (
            (RUN, new, bench.run, "evalsha"),
            (REPLAY, replayed, bench.begin, "evalsha"),
            (GET, read, lambda key: bench.client.get(bench.store.name(key)), "get"),
        ):
            rest = iter(keys)
            bench.client.config_resetstat()
            client = median_microseconds(lambda call=call, rest=rest: call(next(rest)), self.EACH)
            times[operation] = (client, bench.usec_per_call(command))
        bench.client.unlink(*map(bench.store.name, new))
        return times


def _fill(bench: Bench, size: int) -> None:
    template = bench.store.name(bench.run())
    added_memory(bench.client, lambda: fill(bench.client, template, size))


def _key(number: int) -> Key:
    return Key(TASK, digest_of(number), FINGERPRINT)


def _curves(title: str, times: Mapping[str, Rounds]) -> Curves:
    curves = {
        operation: [(float(size), Spread.from_values(each)) for size, each in by_size.items()]
        for operation, by_size in times.items()
    }
    return Curves(title, "µs", "records", curves, logarithmic=True)
