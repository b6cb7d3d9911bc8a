"""The size of records."""

from __future__ import annotations

from uuid import uuid4

from celery import Celery

from labs.benchmarks.bench import Bench, memory_usage, private_server
from labs.benchmarks.costs import exact_cost
from labs.benchmarks.figure import Bars, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.measure import Measure, ProgressCallback

#: Bytes of results as JSON.
SIZES = (16, 100, 500, 2048)
DOCUMENTED_SIZE = 100


class Memory(Measure):
    """The size of a record by ``MEMORY USAGE``, its name included, and that of Celery's result."""

    name = "memory"
    title = "record size"
    is_exact = True

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        figures: list[Figure] = []
        bars: dict[str, Spread] = {}
        ours: list[str] = []
        with private_server() as server:
            bench = Bench(server)
            app = Celery("shop", backend=server.url, set_as_current=False)
            for size in SIZES:
                celery_size = _celery_result_size(app, bench, size)
                record_size = bench.record_size(bench.run(size=size))
                label = f"result of {size} bytes"
                if size == DOCUMENTED_SIZE:
                    cost = exact_cost(
                        f"memory of Redis until it expires, {label}",
                        "bytes",
                        celery_size,
                        celery_size + record_size,
                        celery_size + record_size,
                    )
                    figures.append(Figure(label, record_size, "bytes", Goal(260)))
                figures.append(
                    Figure(
                        f"{label}, compared with Celery's",
                        record_size,
                        "bytes",
                        Goal(celery_size, "<"),
                    )
                )
                ours.append(f"record, {label}")
                bars |= {
                    f"record, {label}": Spread.from_values([record_size]),
                    f"Celery's, {label}": Spread.from_values([celery_size]),
                }
            running = next(bench.new_keys)
            bench.begin(running)
            figures.append(Figure("running execution", bench.record_size(running), "bytes"))
            app.close()
        return MeasureResult(
            figures,
            [Bars("Record size, its name included", "bytes", bars, ours)],
            costs=[cost],
        )


def _celery_result_size(app: Celery, bench: Bench, size: int) -> int:
    task_id = str(uuid4())
    app.backend.store_result(task_id, "x" * (size - 2), "SUCCESS")
    return memory_usage(bench.client, app.backend.get_key_for_task(task_id))
