"""Stores what the workers do: attempts to charge, and the signals of celery-idempotent.

The journal is a separate file. In the ledger's file, a row would wait for the transaction that it
describes, because SQLite has one writer at a time, or would be rolled back with it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from celery.utils.dispatch import Signal

from celery_idempotent import signals

from .ledger import connect

SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    event_id TEXT NOT NULL,
    task_id  TEXT NOT NULL,
    pid      INTEGER NOT NULL,
    at       REAL NOT NULL              -- Unix time in seconds
);
CREATE INDEX IF NOT EXISTS attempts_by_event ON attempts (event_id);
CREATE TABLE IF NOT EXISTS journal (
    signal  TEXT NOT NULL,
    task_id TEXT NOT NULL,
    key     TEXT NOT NULL,
    at      REAL NOT NULL               -- Unix time in seconds
);
"""

SIGNALS: dict[str, Signal] = {
    "begun": signals.begun,
    "completed": signals.completed,
    "replayed": signals.replayed,
    "conflicted": signals.conflicted,
    "taken_over": signals.taken_over,
    "failed": signals.failed,
    "released": signals.released,
    "lease_lost": signals.lease_lost,
    "outcome_unsaved": signals.outcome_unsaved,
    "store_unavailable": signals.store_unavailable,
    "shadowed": signals.shadowed,
}


class Journal:
    """A row for each attempt of a worker process, and for each signal that it sent."""

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)

    def create(self) -> None:
        """Creates the tables."""
        with connect(self.file) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)

    def listen(self) -> None:
        """Stores each signal that is sent in this process and in those that it forks."""
        for signal in SIGNALS.values():
            signal.connect(self._write, weak=False)

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

    def was_completed(self, task_id: str, *, before: float) -> bool:
        """Returns whether the record of the execution was completed, before this Unix time."""
        with connect(self.file) as connection:
            row = connection.execute(
                "SELECT 1 FROM journal WHERE signal = 'completed' AND task_id = ? AND at < ?",
                (task_id, before),
            ).fetchone()
        return row is not None

    def counts(self) -> Counter[str]:
        """Returns how often each signal was sent."""
        with connect(self.file) as connection:
            rows = connection.execute("SELECT signal, count(*) FROM journal GROUP BY signal")
            return Counter(dict(rows.fetchall()))

    def task_ids(self, *names: str) -> list[str]:
        """Returns the task ids of these signals, one for each signal that was sent."""
        marks = ", ".join("?" for _ in names)
        with connect(self.file) as connection:
            rows = connection.execute(
                f"SELECT task_id FROM journal WHERE signal IN ({marks}) ORDER BY rowid", names
            )
            return [task_id for (task_id,) in rows]

    def _write(self, signal: Signal, task_id: str, key: str, decision: str = "", **_: Any) -> None:
        name = decision or signal.name.removeprefix(signals.PREFIX)
        with connect(self.file) as connection:
            connection.execute(
                "INSERT INTO journal VALUES (?, ?, ?, ?)", (name, task_id, key, time.time())
            )
