"""The memory that a rate and a retention need."""

from __future__ import annotations

from labs.benchmarks.bench import Bench, private_server
from labs.benchmarks.figure import Figure, MeasureResult
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.records import added_memory, fill

#: Bytes of results as JSON.
SIZES = (16, 100, 500, 2048)
DOCUMENTED_SIZE = 100
#: Different keys per second.
RATES = (1, 10, 100, 1_000)
DAY = 86_400


class Sizing(Measure):
    """The memory that each record adds to Redis: name, value, expiry and hash table entries.

    The rate counts different keys; duplicates add nothing. The retention of a day is the default
    of `idempotency_result_ttl`; memory is proportional to both.
    """

    name = "sizing"
    title = "memory by rate and retention"
    page = "scaling"
    is_exact = True

    RECORDS = 200_000

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        bytes_per_record: dict[int, float] = {}
        for number, size in enumerate(SIZES):
            bytes_per_record[size] = round(_memory_of(size, self.RECORDS) / self.RECORDS)
            progress((number + 1) / len(SIZES))
        return MeasureResult(
            [
                *(
                    Figure(f"one record, result of {size} bytes", number, "bytes")
                    for size, number in bytes_per_record.items()
                ),
                *(
                    Figure(
                        f"{rate:,} tasks/s for a day, results of {DOCUMENTED_SIZE} bytes",
                        rate * DAY * bytes_per_record[DOCUMENTED_SIZE] / 1e9,
                        "GB",
                    )
                    for rate in RATES
                ),
            ]
        )


def _memory_of(size: int, records: int) -> float:
    with private_server() as server:
        bench = Bench(server)
        template = bench.store.name(bench.run(size=size))
        return added_memory(bench.client, lambda: fill(bench.client, template, records))
