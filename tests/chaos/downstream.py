"""The system downstream: an account for each order, in SQLite, that asks writers for their token.

Each execution shows its token when it begins and again when it writes. The account keeps the
highest that it has seen and takes nothing from a lower one. All that is asked of it is noted in the
order in which it was asked, whether granted or not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

_TABLES = """
CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, token INTEGER, receipt TEXT);
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, account TEXT, execution TEXT, token INTEGER, receipt TEXT,
    accepted INTEGER
);
"""
_ADMIT = """
INSERT INTO accounts VALUES (:account, :token, :receipt)
ON CONFLICT (name) DO UPDATE SET token = :token, receipt = coalesce(:receipt, receipt)
WHERE token <= :token
"""
_NOTE = "INSERT INTO entries VALUES (NULL, :account, :execution, :token, :receipt, :accepted)"

#: Seconds: a process may be frozen while it writes.
_PATIENCE = 30.0


@dataclass(frozen=True)
class Entry:
    """What one execution asked for: to begin (no receipt), or to write its receipt."""

    execution: str
    token: int
    receipt: str | None
    accepted: bool


class Downstream:
    """Asked by workers, read by the judge."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with closing(sqlite3.connect(path)) as database:
            # One that is asked by many; its machine does not crash.
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_TABLES)

    def ask(self, account: str, execution: str, token: int, receipt: str | None = None) -> bool:
        """Begin, or write `receipt`, under `token`; whether that is accepted."""
        asked = {"account": account, "execution": execution, "token": token, "receipt": receipt}
        with self._open() as database:
            accepted = database.execute(_ADMIT, asked).rowcount == 1
            database.execute(_NOTE, asked | {"accepted": accepted})
        return accepted

    def receipts(self) -> dict[str, str | None]:
        """What each account says in the end."""
        with self._open() as database:
            return dict(database.execute("SELECT name, receipt FROM accounts"))

    def entries(self) -> dict[str, list[Entry]]:
        """All that was asked for, by account, in that order."""
        asked: dict[str, list[Entry]] = {}
        columns = "account, execution, token, receipt, accepted"
        with self._open() as database:
            for account, execution, token, receipt, accepted in database.execute(
                f"SELECT {columns} FROM entries ORDER BY number"
            ):
                entry = Entry(execution, token, receipt, bool(accepted))
                asked.setdefault(account, []).append(entry)
        return asked

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        # A connection each time: nothing is left half done in a process that is killed in between.
        with closing(sqlite3.connect(self._path, _PATIENCE, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = OFF")
            database.execute("BEGIN IMMEDIATE")
            with database:
                yield database
