"""The table of outcomes: its statements, for any driver, and its rows.

Times are milliseconds since the epoch by the database's clock. Statements write parameters as
``:name``; a session translates them for its driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State
from celery_idempotent.errors import SettingsError, TransactionError
from celery_idempotent.sql import OPTION

TABLE = "celery_idempotency_outcomes"

#: The supported dialects, each with an expression for its clock in milliseconds.
_NOW = {
    "postgresql": "CAST(FLOOR(EXTRACT(EPOCH FROM clock_timestamp()) * 1000) AS BIGINT)",
    "mysql": "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}

#: The state of a row whose transaction is open. Other transactions cannot read it, unless a body or
#: a connection with autocommit has committed it by mistake.
CLAIMED = "CLAIMED"


class Statements:
    """The statements of one dialect.

    Raises:
        SettingsError: if the dialect is not supported.
    """

    def __init__(self, dialect: str) -> None:
        dialect = "mysql" if dialect == "mariadb" else dialect
        if dialect not in _NOW:
            raise SettingsError(
                f"{OPTION}: {dialect} is not supported; use PostgreSQL, MySQL, MariaDB or SQLite"
            )
        now, is_server = _NOW[dialect], dialect != "sqlite"
        # SQLite has no row locks: one transaction writes at a time.
        skip_locked = " FOR UPDATE SKIP LOCKED" if is_server else ""
        # For a small table, the optimizer of MySQL prefers a table scan, which would wait for rows
        # that others have locked.
        by_id = f"{TABLE} FROM {TABLE} FORCE INDEX (PRIMARY)"
        purged = by_id if dialect == "mysql" else f"FROM {TABLE}"
        self.claim = (
            f"INSERT INTO {TABLE} ({', '.join(Claim._fields)})"
            f" VALUES ({', '.join(f':{name}' for name in Claim._fields)})"
        )
        self.take_over = (
            f"UPDATE {TABLE} SET {', '.join(f'{name} = :{name}' for name in Claim._fields[1:])},"
            " outbox = NULL, finished_at = NULL, expires_at = NULL"
            " WHERE id = :id AND owner = :seen"
        )
        self.finish = (
            f"UPDATE {TABLE} SET turn = NULL, state = :state, format = :format, body = :body,"
            f" outbox = :outbox, finished_at = {now}, expires_at = {now} + :retention_ms"
            " WHERE id = :id AND owner = :owner"
        )
        #: Marks the messages of the outbox as published.
        self.clear_outbox = f"UPDATE {TABLE} SET outbox = NULL WHERE id = :id AND owner = :owner"
        self.find = f"SELECT {', '.join(Row._fields[:-1])}, {now} FROM {TABLE} WHERE id = :id"
        #: The numbers of all rows and of expired ones.
        self.totals = (
            f"SELECT COUNT(*), COALESCE(SUM(CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END), 0)"
            f" FROM {TABLE}"
        )
        self.forget = f"DELETE FROM {TABLE} WHERE id = :id"
        #: Deletes the row if it still has this owner.
        self.forget_shown = f"DELETE FROM {TABLE} WHERE id = :id AND owner = :owner"
        #: Executed before a purge, if not empty. At a higher isolation level, a purge would set gap
        #: locks, which block claims (MySQL), or fail with serialization errors (PostgreSQL).
        self.purge_begin = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED" if is_server else ""
        #: Selects expired rows, oldest first, without those that are being taken over.
        self.expired = (
            f"SELECT id, expires_at FROM {TABLE}"
            f" WHERE expires_at >= :after AND expires_at <= {now} AND outbox IS NULL"
            f" ORDER BY expires_at LIMIT :limit{skip_locked}"
        )
        #: Returns a row if one expired that long ago.
        self.overdue = (
            f"SELECT id FROM {TABLE} WHERE expires_at <= {now} - :age_ms AND outbox IS NULL LIMIT 1"
        )
        #: Deletes expired rows; the caller appends the list of ids. It checks the time again, since
        #: in SQLite, without row locks, a row may have been taken over after it was selected.
        self.purge = f"DELETE {purged} WHERE expires_at <= {now} AND id IN "
        #: Limits how long the transaction waits for a lock; empty where the server has a limit.
        self.limit_wait = "SET LOCAL lock_timeout = '5s'" if dialect == "postgresql" else ""


def row_id(prefix: str, key: Key) -> str:
    """Returns the primary key of the row of `key`, in hexadecimal so that no collation matters.

    A key that may run again has a row for each of its messages.
    """
    name = f"{prefix}:{key} {key.message}" if key.message else f"{prefix}:{key}"
    return blake2b(name.encode(), digest_size=16).hexdigest()


def committed_without_outcome() -> TransactionError:
    """Returns the error for a row that cannot be claimed and has no outcome."""
    return TransactionError(
        f"a row of {TABLE} was committed without an outcome: the connection commits each statement "
        "(autocommit), or a body has committed its transaction; forget the key to let it run again"
    )


class Claim(NamedTuple):
    """The columns that an execution sets when it claims a row, before its body runs."""

    #: The primary key, made from the prefix and the key by `row_id`.
    id: str
    #: For a key that may run again, the id of the key's turn until the execution has finished; else
    #: None. The column is unique, so the messages of such a key run one after the other.
    turn: str | None
    #: The key as text, as in `Record.key`.
    record_key: str
    #: Random id of the execution. A statement that names it changes no row of another execution.
    owner: str
    fingerprint: str
    task_id: str = ""
    worker: str = ""
    token: int = 0
    attempt: int = 0
    state: str = CLAIMED
    format: str = ""
    body: bytes = b""

    @classmethod
    def of(cls, key: Key, prefix: str, **execution: Any) -> Claim:
        """Returns the claim of the row of `key`.

        Args:
            prefix: of the names in Redis.
            execution: the columns that describe the execution.
        """
        row, owner = row_id(prefix, key), os.urandom(16).hex()
        turn = row_id(prefix, key.turn) if key.message else None
        return cls(row, turn, str(key), owner, key.fingerprint.hex(), **execution)


class OutcomeValues(NamedTuple):
    """The columns that an execution sets when it finishes."""

    state: State
    format: str
    body: bytes
    retention_ms: int
    #: Messages to publish after the commit, in the form of
    #: :mod:`celery_idempotent.extensions.outbox`.
    outbox: bytes | None = None


#: In the body of a row whose task has replaced itself: the bytes before the other task's id.
AWAITED_BYTES = 7


class Row(NamedTuple):
    """A committed row."""

    id: str
    owner: str
    state: str
    task_id: str
    worker: str
    token: int
    attempt: int
    fingerprint: str
    format: str
    body: bytes
    #: Messages to publish after the commit; None once they are published.
    outbox: bytes | None
    finished_at: int
    expires_at: int
    #: The database's time when the row was read, in milliseconds, as the times above.
    now: int

    @classmethod
    def read(cls, values: Sequence[Any]) -> Row:
        """Returns the row that the statement `find` selected.

        A row committed without an outcome has the state CLAIMED.
        """
        row = cls(*values)
        return row._replace(
            body=bytes(row.body),
            outbox=None if row.outbox is None else bytes(row.outbox),
            finished_at=row.finished_at or 0,
            expires_at=row.expires_at or 0,
        )

    @property
    def expired(self) -> bool:
        """Whether its retention has ended; a row without an outcome never expires."""
        return 0 < self.expires_at <= self.now

    @property
    def delegates(self) -> bool:
        """Whether its task has replaced itself with another, which gives the outcome."""
        return self.format.startswith("=")

    @property
    def awaited(self) -> int:
        """The first generation of the message that continues, if its task has replaced itself."""
        return int.from_bytes(self.body[:AWAITED_BYTES], "big") if self.delegates else 0

    @property
    def remaining_ms(self) -> int:
        """The rest of its retention in milliseconds, at least 1."""
        return max(1, self.expires_at - self.now)

    def with_outcome(self) -> Row:
        """Returns this row, after a check that it has an outcome.

        Raises:
            TransactionError: if it was committed without an outcome.
        """
        if self.state == CLAIMED:
            raise committed_without_outcome()
        return self

    def record(self, key: Key, decode: Callable[[Record], Any]) -> Record:
        """Returns the record that Redis would have for `key`."""
        encoding, _, traceparent = self.format.partition(" ")
        return Record(
            state=State(self.state),
            key=str(key),
            task=key.task,
            task_id=self.task_id,
            worker=self.worker,
            token=self.token,
            attempt=self.attempt,
            at_ms=self.finished_at,
            fingerprint=bytes.fromhex(self.fingerprint),
            format=encoding,
            traceparent=traceparent,
            body=self.body[AWAITED_BYTES:] if self.delegates else self.body,
            awaited=self.awaited,
            decode=decode,
        )
