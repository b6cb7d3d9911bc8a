"""Stores the signals of celery-idempotent in a table next to the ledger."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from celery.utils.dispatch import Signal

from celery_idempotent import signals

from .ledger import connect

SCHEMA = """
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
    **{name: getattr(signals, name) for name in signals.SHADOW},
}


class Journal:
    """A table with one row for each signal that a worker process sent."""

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)

    def create(self) -> None:
        """Creates the table."""
        with connect(self.file) as connection:
            connection.executescript(SCHEMA)

    def listen(self) -> None:
        """Stores each signal that is sent in this process and in those that it forks."""
        for signal in SIGNALS.values():
            signal.connect(self._write, weak=False)

    def counts(self) -> Counter[str]:
        """Returns how often each signal was sent."""
        with connect(self.file) as connection:
            rows = connection.execute("SELECT signal, count(*) FROM journal GROUP BY signal")
            return Counter(dict(rows.fetchall()))

    def task_ids(self, *names: str) -> list[str]:
        """Returns the task ids of these signals, one for each time that one was sent."""
        marks = ", ".join("?" for _ in names)
        with connect(self.file) as connection:
            rows = connection.execute(
                f"SELECT task_id FROM journal WHERE signal IN ({marks}) ORDER BY rowid", names
            )
            return [task_id for (task_id,) in rows]

    def _write(self, signal: Signal, task_id: str, key: str, **_: Any) -> None:
        name = signal.name.removeprefix(signals.PREFIX)
        with connect(self.file) as connection:
            connection.execute(
                "INSERT INTO journal VALUES (?, ?, ?, ?)", (name, task_id, key, time.time())
            )
