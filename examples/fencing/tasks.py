"""Stores the total of each day in a SQLite table that checks fencing tokens.

An execution that was frozen for longer than its lease may continue after another one has taken
over. Redis rejects its result, but an external system accepts its writes unless it checks the
fencing token. This table stores the highest token of each day, and rejects writes with a lower one.

    celery -A examples.fencing.tasks worker
    >>> total.delay("2026-11-21").get()

CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend; TOTALS_FILE sets
the file of the table.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("fencing")

TABLE = """
CREATE TABLE IF NOT EXISTS totals (day TEXT PRIMARY KEY, amount INTEGER, token INTEGER)
"""
WRITE = """
INSERT INTO totals VALUES (:day, :amount, :token)
ON CONFLICT (day) DO UPDATE SET amount = :amount, token = :token WHERE token <= :token
"""


class StaleWriteError(Exception):
    """An execution with a higher fencing token has already written."""


@app.task(bind=True, base=IdempotentTask, idempotency_key="day:{day}")
def total(self: IdempotentTask, day: str) -> int:
    """Computes and stores the total of a day."""
    amount = add_up(day)
    write(day, amount, self.idempotency.token)
    return amount


def add_up(day: str) -> int:
    """Represents a long computation."""
    return sum(map(ord, day))


def write(day: str, amount: int, token: int) -> None:
    """Stores the total of a day with a fencing token.

    Raises:
        StaleWriteError: if the stored total has a higher token.
    """
    with closing(connect()) as database, database:
        if database.execute(WRITE, {"day": day, "amount": amount, "token": token}).rowcount == 0:
            raise StaleWriteError(f"the total of {day} was written by a later execution")


def read(day: str) -> int | None:
    """Returns the total of a day, or None."""
    with closing(connect()) as database:
        row = database.execute("SELECT amount FROM totals WHERE day = ?", (day,)).fetchone()
    return None if row is None else row[0]


def connect() -> sqlite3.Connection:
    """Opens the database, and creates the table if it is missing."""
    database = sqlite3.connect(os.environ.get("TOTALS_FILE", "totals.sqlite"))
    database.execute(TABLE)
    return database
