"""An append-only ledger in SQLite, without a unique constraint.

A unique event id would turn a double charge into an error. Here every charge is a row, so that a
double charge is visible as two rows.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from .events import Payment

BUSY_TIMEOUT_SECONDS = 10.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    event_id TEXT NOT NULL,
    task_id  TEXT NOT NULL,
    pid      INTEGER NOT NULL,
    at       REAL NOT NULL              -- Unix time in seconds
);
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
    at        REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS attempts_by_event ON attempts (event_id);
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
        """Creates the tables."""
        with connect(self.file) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)

    def add_attempt(self, event_id: str, task_id: str) -> int:
        """Stores that this process begins to charge; returns the event's number of attempts."""
        with connect(self.file) as connection:
            connection.execute(
                "INSERT INTO attempts VALUES (?, ?, ?, ?)",
                (event_id, task_id, os.getpid(), time.time()),
            )
            (count,) = connection.execute(
                "SELECT count(*) FROM attempts WHERE event_id = ?", (event_id,)
            ).fetchone()
        return int(count)

    def first_attempt_pid(self, event_id: str) -> int | None:
        """Returns the process that first began to charge `event_id`, or None."""
        with connect(self.file) as connection:
            row = connection.execute(
                "SELECT pid FROM attempts WHERE event_id = ? ORDER BY rowid LIMIT 1", (event_id,)
            ).fetchone()
        return None if row is None else int(row[0])

    def attempt_times(self, event_id: str) -> list[float]:
        """Returns when processes began to charge `event_id`, in Unix seconds."""
        with connect(self.file) as connection:
            rows = connection.execute(
                "SELECT at FROM attempts WHERE event_id = ? ORDER BY rowid", (event_id,)
            ).fetchall()
        return [float(at) for (at,) in rows]

    def append(self, charge: Charge) -> None:
        """Stores `charge`."""
        with connect(self.file) as connection:
            connection.execute(
                "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    charge.charge_id,
                    *astuple(charge.payment),
                    charge.token,
                    charge.attempt,
                    charge.task_id,
                    charge.pid,
                    time.time(),
                ),
            )

    def charges(self) -> list[Charge]:
        """Returns all charges in the order in which they were stored."""
        with connect(self.file) as connection:
            rows = connection.execute(
                "SELECT charge_id, event_id, customer, amount, currency,"
                " token, attempt, task_id, pid FROM charges ORDER BY rowid"
            ).fetchall()
        return [Charge(row[0], Payment(*row[1:5]), *row[5:]) for row in rows]
