"""Bytes."""

from __future__ import annotations

from uuid import uuid4

from celery import Celery

from tests.labs.benchmarks.bench import Bench, memory, own_server
from tests.labs.benchmarks.figure import Bars, Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show

#: Bytes of results as JSON.
SIZES = (16, 100, 500, 2048)
ASKED = 100


class Memory(Measure):
    """What a record takes by ``MEMORY USAGE``, its name included, beside Celery's own result."""

    name = "memory"
    title = "bytes of a record"
    counts = True

    def measure(self, show: Show) -> Finding:
        figures: list[Figure] = []
        bars: dict[str, Spread] = {}
        ours: list[str] = []
        with own_server() as server:
            bench = Bench(server)
            app = Celery("shop", backend=server.url, set_as_current=False)
            for size in SIZES:
                theirs = _celerys(app, bench, size)
                taken = bench.bytes_of(bench.run(size=size))
                told = f"result of {size} bytes"
                if size == ASKED:
                    figures.append(Figure(told, taken, "bytes", Goal(260)))
                below = Goal(theirs, "<")
                figures.append(Figure(f"{told}, beside Celery's meta", taken, "bytes", below))
                ours.append(f"record, {told}")
                bars |= {
                    f"record, {told}": Spread.of([taken]),
                    f"Celery's meta, {told}": Spread.of([theirs]),
                }
            running = next(bench.fresh)
            bench.begin(running)
            figures.append(Figure("while it runs", bench.bytes_of(running), "bytes"))
            app.close()
        return Finding(figures, [Bars("Bytes of a record, its name included", "bytes", bars, ours)])


def _celerys(app: Celery, bench: Bench, size: int) -> int:
    task_id = str(uuid4())
    app.backend.store_result(task_id, "x" * (size - 2), "SUCCESS")
    return memory(bench.client, app.backend.get_key_for_task(task_id))
