"""A day's total in a SQLite table that asks each writer for its fencing token.

An execution that was frozen past its lease does not know that another one has taken over. Its
result is refused, but what it writes elsewhere is not, unless that place looks at the token. This
table does: it keeps the highest that it has seen, and takes nothing from a lower one.

    celery -A examples.fencing.tasks worker
    >>> total.delay("2026-11-21").get()

Broker and result backend come from CELERY_BROKER_URL and CELERY_RESULT_BACKEND, the file from
TOTALS_FILE.
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
    """A later execution has written already."""


@app.task(bind=True, base=IdempotentTask, idempotency_key="day:{day}")
def total(self: IdempotentTask, day: str) -> int:
    """Add up the day and write it down."""
    amount = add_up(day)
    write(day, amount, self.idempotency.token)
    return amount


def add_up(day: str) -> int:
    """What takes long."""
    return sum(map(ord, day))


def write(day: str, amount: int, token: int) -> None:
    """Write the total of a day under a fencing token.

    Raises:
        StaleWriteError: if an execution with a higher token has written.
    """
    with closing(connect()) as database, database:
        if database.execute(WRITE, {"day": day, "amount": amount, "token": token}).rowcount == 0:
            raise StaleWriteError(f"the total of {day} was written by a later execution")


def read(day: str) -> int | None:
    """The total of a day, if there is one."""
    with closing(connect()) as database:
        row = database.execute("SELECT amount FROM totals WHERE day = ?", (day,)).fetchone()
    return None if row is None else row[0]


def connect() -> sqlite3.Connection:
    """The database, with its table."""
    database = sqlite3.connect(os.environ.get("TOTALS_FILE", "totals.sqlite"))
    database.execute(TABLE)
    return database
