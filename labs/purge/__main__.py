"""``make purge``: how long `purge` takes, and what a task that claims its row notices of it.

A table is filled with expired rows. A writer claims and commits rows of its own, at a fixed rate:
first alone, then while the rows are purged in batches, as ``celery idempotency purge`` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import sqlalchemy as sa

from celery_idempotent.contrib.sqlalchemy import metadata, outcomes
from celery_idempotent.operations.cli.changes import BATCH
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.transaction import Transaction
from labs.purge.writer import a_claim, write
from tests.servers.sql_server import MariaDB, PostgreSQL, SQLServer

SERVERS: dict[str, Callable[[], SQLServer]] = {
    "postgresql": PostgreSQL.start,
    "mariadb": MariaDB.start,
}
#: A body of 64 bytes and ids of their usual length.
_VALUES = (
    "'shop.charge:0123456789012345678901', 'owner', 'COMPLETED', "
    "'01234567-0123-0123-0123-012345678901', 'celery@worker-1/1234', 1, 1, '0123456789abcdef', "
    "'json', '{body}', 1, 1000 + {number}"
)
_COLUMNS = (
    "id, record_key, owner, state, task_id, worker, token, attempt, fingerprint, format, body, "
    "finished_at, expires_at"
)
_FILL = {
    "postgresql": (
        "SELECT md5(n::text), "
        + _VALUES.format(body="x" * 64, number="n").replace("'x", "E'x")
        + " FROM generate_series({first}, {last}) AS n"
    ),
    "mariadb": (
        "SELECT md5(seq), "
        + _VALUES.format(body="x" * 64, number="seq")
        + " FROM seq_{first}_to_{last}"
    ),
}
#: Bytes; the server of the tests has 32 MiB.
_BUFFER_POOL = 2**30
#: Rows that one INSERT fills in.
_CHUNK = 250_000


@dataclass
class Times:
    """Durations in milliseconds."""

    values: list[float]

    def quantile(self, share: float) -> float:
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    def __str__(self) -> str:
        return (
            f"median {statistics.median(self.values):.1f} ms, p99 {self.quantile(0.99):.1f} ms, "
            f"longest {max(self.values):.1f} ms ({len(self.values):,})"
        )


def fill(engine: sa.Engine, kind: str, rows: int) -> None:
    """Fills the table with expired rows."""
    for first in range(1, rows + 1, _CHUNK):
        last = min(rows, first + _CHUNK - 1)
        select = _FILL[kind].format(first=first, last=last)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"INSERT INTO {outcomes.name} ({_COLUMNS}) {select}")
    analyze = "VACUUM ANALYZE" if kind == "postgresql" else "ANALYZE TABLE"
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.exec_driver_sql(f"{analyze} {outcomes.name}")


def purge(database: Database, batch: int) -> Times:
    """Deletes all expired rows in batches."""
    times = []
    after = 0
    while True:
        started = time.perf_counter()
        found, after = database.purge(batch, after)
        times.append((time.perf_counter() - started) * 1000)
        if found < batch:
            return Times(times)


def measure(kind: str, rows: int, batch: int, alone: float, *, beside_transaction: bool) -> None:
    """Prints the times of one kind of database."""
    with SERVERS[kind]() as server:
        if kind == "mariadb":
            server.execute(f"SET GLOBAL innodb_buffer_pool_size = {_BUFFER_POOL}")
        url = server.create_database()
        engine = sa.create_engine(url)
        metadata.create_all(engine)
        started = time.perf_counter()
        fill(engine, kind, rows)
        print(f"{kind}: filled with {rows:,} rows in {time.perf_counter() - started:.0f} s")
        ours, theirs = multiprocessing.Pipe()
        writer = multiprocessing.get_context("spawn").Process(
            target=write, args=(url, theirs), daemon=True
        )
        writer.start()
        time.sleep(5)  # it imports, and connects
        _times_of(ours)
        time.sleep(alone)
        print(f"  claims without purge: {_times_of(ours)}")
        database = Database(engine)
        old = Transaction(database)
        if beside_transaction:
            old.begin(a_claim())
            # A snapshot, on MariaDB.
            old.connection.execute(sa.select(outcomes.c.id).limit(1))
        started = time.perf_counter()
        batches = purge(database, batch)
        seconds = time.perf_counter() - started
        old.rollback()
        print(f"  claims during purge:  {_times_of(ours)}")
        print(f"  batches of {batch}:       {batches}")
        print(f"  all: {seconds:.0f} s, {rows / seconds:,.0f} rows/s", flush=True)
        ours.send("stop")
        writer.join(10)
        engine.dispose()


def _times_of(pipe: Connection) -> Times:
    pipe.send("times")
    return Times(pipe.recv())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m labs.purge", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument(
        "--alone", type=float, default=30, help="seconds of the writer without purge; default: 30"
    )
    parser.add_argument("--kind", choices=SERVERS, action="append")
    parser.add_argument(
        "--beside-transaction",
        action="store_true",
        help="purge while an old transaction is open, as that of a long task is",
    )
    arguments = parser.parse_args()
    for kind in arguments.kind or SERVERS:
        measure(
            kind,
            arguments.rows,
            arguments.batch,
            arguments.alone,
            beside_transaction=arguments.beside_transaction,
        )


if __name__ == "__main__":
    main()
