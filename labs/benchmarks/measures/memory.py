"""The size of records."""

from __future__ import annotations

from uuid import uuid4

from celery import Celery
from redis import Redis

from celery_idempotent import IdempotentTask
from labs.benchmarks.figure import Cost, Figure, MeasureResult, Spread
from labs.benchmarks.measure import Measure
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

#: Bytes of results as JSON.
SIZES = (16, 100, 500, 2048)
DOCUMENTED_SIZE = 100
COPIES = 20_000


class Memory(Measure):
    """The size of a record by ``MEMORY USAGE``, its name included, and that of Celery's result.

    One record of many also needs entries of hash tables.
    """

    name = "memory"
    title = "record size"

    def measure(self) -> MeasureResult:
        figures, costs = [], []
        with RedisServer.start() as server, server.client() as client:
            app = Celery("shop", broker=server.url, backend=server.url, set_as_current=False)

            @app.task(base=IdempotentTask, name="shop.charge", shared=False)
            def charge(size: int) -> str:
                return "x" * (size - 2)

            for size in SIZES:
                task_id = str(uuid4())
                app.backend.store_result(task_id, charge.apply((size,)).get(), "SUCCESS")
                celery = _memory_usage(client, app.backend.get_key_for_task(task_id))
                name = f"idem:{charge.idempotency_key_of(size)}"
                record = _memory_usage(client, name)
                label = f"result of {size} bytes"
                if size == DOCUMENTED_SIZE:
                    title, both = f"memory of Redis until it expires, {label}", celery + record
                    more = Spread.from_values([record])
                    costs.append(Cost(title, "bytes", celery, both, more, both))
                    figures.append(Figure(label, record, "bytes", goal=260))
                compared = f"{label}, compared with Celery's"
                figures.append(Figure(compared, record, "bytes", goal=celery))
                figures.append(
                    Figure(f"one record, {label}", _added_by_copies(client, name), "bytes")
                )
            app.close()
        return MeasureResult(figures, costs)


def _memory_usage(client: Redis, name: str | bytes) -> int:
    usage = client.memory_usage(name)
    assert usage is not None, name
    return int(usage)


def _added_by_copies(client: Redis, name: str) -> float:
    """Returns by how many bytes each of many copies increases the server's memory."""
    before = client.info("memory")["used_memory"]
    pipeline = client.pipeline(transaction=False)
    for number in range(COPIES):
        pipeline.copy(name, f"{name[:-8]}{number:08}")
    pipeline.execute()
    eventually(lambda: not _is_rehashing(client), "the server has ended rehashing")
    return float(round((client.info("memory")["used_memory"] - before) / COPIES))


def _is_rehashing(client: Redis) -> bool:
    return bool(client.info("memory").get("mem_overhead_db_hashtable_rehashing"))
