"""What memory a rate and a retention need."""

from __future__ import annotations

from tests.labs.benchmarks.bench import Bench, own_server
from tests.labs.benchmarks.figure import Figure, Finding
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.records import added_by, fill

#: Bytes of results as JSON.
SIZES = (16, 100, 500, 2048)
ASKED = 100
#: Different keys a second.
RATES = (1, 10, 100, 1_000)
DAY = 86_400


class Sizing(Measure):
    """What Redis's memory grows by for each record: name, value, expiry and tables.

    A rate is one of different keys; duplicates add nothing. A day is the retention that
    `idempotency_result_ttl` has by default, and memory grows in proportion to either.
    """

    name = "sizing"
    title = "memory for a rate and a retention"
    page = "scaling"
    counts = True

    RECORDS = 200_000

    def measure(self, show: Show) -> Finding:
        each: dict[int, float] = {}
        for number, size in enumerate(SIZES):
            each[size] = round(_added_by(size, self.RECORDS) / self.RECORDS)
            show((number + 1) / len(SIZES))
        return Finding(
            [
                *(Figure(f"a record, result of {s} bytes", b, "bytes") for s, b in each.items()),
                *(
                    Figure(
                        f"{rate:,} tasks a second for a day, results of {ASKED} bytes",
                        rate * DAY * each[ASKED] / 1e9,
                        "GB",
                    )
                    for rate in RATES
                ),
            ]
        )


def _added_by(size: int, records: int) -> float:
    with own_server() as server:
        bench = Bench(server)
        template = bench.store.name(bench.run(size=size))
        return added_by(bench.client, lambda: fill(bench.client, template, records))
