"""An append-only ledger in SQLite, without a unique constraint.

A unique event id would turn a double charge into an error. Here every charge is a row, so that a
double charge is visible as two rows.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from sqlalchemy import Connection, create_engine

from celery_idempotent.contrib.sqlalchemy import metadata

from .events import Payment

BUSY_TIMEOUT_SECONDS = 10.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (
    charge_id TEXT NOT NULL,
    event_id  TEXT NOT NULL,
    customer  TEXT NOT NULL,
    amount    INTEGER NOT NULL,         -- in cents
    currency  TEXT NOT NULL,
    token     INTEGER,                  -- fencing token; NULL for a plain task
    attempt   INTEGER,                  -- the key's attempt; NULL for a plain task
    task_id   TEXT NOT NULL,
    pid       INTEGER NOT NULL,
    at        REAL NOT NULL             -- Unix time in seconds
);
CREATE INDEX IF NOT EXISTS charges_by_event ON charges (event_id);
"""


@dataclass(frozen=True)
class Charge:
    """One row of the ledger: a charge of a customer."""

    charge_id: str
    payment: Payment
    token: int | None
    attempt: int | None
    task_id: str
    pid: int


@contextmanager
def connect(file: Path | str) -> Iterator[sqlite3.Connection]:
    """Opens a connection for one use, because forked processes must not share connections."""
    connection = sqlite3.connect(file, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection
    finally:
        connection.close()


class Ledger:
    """The ledger in `file`, written by any number of processes."""

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)

    def create(self) -> None:
        """Creates the table of charges, and beside it the one of outcomes."""
        with connect(self.file) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)
        engine = create_engine(f"sqlite:///{self.file}")
        metadata.create_all(engine)
        engine.dispose()

    @staticmethod
    def append(connection: Connection, charge: Charge) -> int:
        """Stores `charge` in the transaction of `connection`; returns the event's charges."""
        payment = charge.payment
        connection.exec_driver_sql(
            "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                charge.charge_id,
                *astuple(payment),
                charge.token,
                charge.attempt,
                charge.task_id,
                charge.pid,
                time.time(),
            ),
        )
        count = "SELECT count(*) FROM charges WHERE event_id = ?"
        return int(connection.exec_driver_sql(count, (payment.event_id,)).scalar_one())

    def charges(self, event_id: str | None = None) -> list[Charge]:
        """Returns all committed charges, or those of an event, in the order of their storage."""
        with connect(self.file) as connection:
            rows = connection.execute(
                "SELECT charge_id, event_id, customer, amount, currency,"
                " token, attempt, task_id, pid FROM charges"
                " WHERE event_id = coalesce(?, event_id) ORDER BY rowid",
                (event_id,),
            ).fetchall()
        return [Charge(row[0], Payment(*row[1:5]), *row[5:]) for row in rows]
