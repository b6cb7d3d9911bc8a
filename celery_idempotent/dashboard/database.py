"""SQLite databases that several threads share, for the index and the history."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any


class SqliteDatabase:
    """A SQLite database, used by one thread at a time.

    Args:
        file: its path, or ``:memory:``.
        schema: creates the tables.

    Raises:
        sqlite3.Error: if the file cannot be used.
    """

    def __init__(self, file: str, schema: str) -> None:
        self._connection = sqlite3.connect(file, check_same_thread=False)
        self._connection.executescript(schema)
        self._lock = threading.Lock()

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Returns the rows of a query."""
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def write(self, sql: str, rows: Iterable[Sequence[Any]] = ((),)) -> None:
        """Executes a statement for each row, in one transaction."""
        with self._lock, self._connection:
            self._connection.executemany(sql, rows)
