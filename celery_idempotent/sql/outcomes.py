"""The table of outcomes: its statements, for every driver, and its rows.

Times are milliseconds since the epoch by the database's clock. Every statement names its parameters
as ``:name``; a session translates them for its driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from celery_idempotent.errors import SettingsError, TransactionError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record, State

TABLE = "celery_idempotency_outcomes"

#: The dialects that are supported, each with its clock: an expression in milliseconds.
_NOW: Mapping[str, str] = {
    "postgresql": "CAST(FLOOR(EXTRACT(EPOCH FROM clock_timestamp()) * 1000) AS BIGINT)",
    "mysql": "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
}
#: Lets `purge` pass by rows that are being taken over. SQLite has one writer at a time.
_SKIP_LOCKED = dict.fromkeys(("postgresql", "mysql"), " FOR UPDATE SKIP LOCKED")
#: A scan of the table, which the optimizer prefers for small ones, would wait for locked rows.
_BY_ID = {"mysql": f"{TABLE} FROM {TABLE} FORCE INDEX (PRIMARY)"}
#: Without locks on gaps, which would block claims, and without serialization failures.
_READ_COMMITTED = dict.fromkeys(_SKIP_LOCKED, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
_ALIASES = {"mariadb": "mysql"}

#: Of a row whose transaction is open. No other transaction ever reads it.
CLAIMED = "CLAIMED"

_CLAIMED = (
    *("turn", "owner", "state", "task_id", "worker", "token", "attempt", "fingerprint", "body"),
)
_SELECTED = (
    *("owner", "state", "task_id", "worker", "token", "attempt", "fingerprint"),
    *("format", "body", "outbox", "finished_at", "expires_at"),
)


class Statements(NamedTuple):
    """The statements of one dialect."""

    claim: str
    take_over: str
    finish: str
    #: The messages of the outbox were published.
    clear_outbox: str
    find: str
    #: Number of rows, and of those that have expired.
    totals: str
    forget: str
    #: Ends the retention of the rows of steps, if it would last longer.
    limit_steps: str
    #: Deletes the key's row alone, if it is still the one that was shown.
    forget_shown: str
    #: Begins the transaction of a purge; empty if nothing is to be set.
    purge_begin: str
    expired: str
    #: Has a row if one expired that long ago.
    overdue: str
    #: Lacks the list of ids.
    purge: str
    #: Limits the time that the transaction waits for a lock; empty if the server limits it.
    limit_wait: str


@lru_cache
def statements(dialect: str) -> Statements:
    """Returns the statements of a dialect.

    Raises:
        SettingsError: if the dialect is not supported.
    """
    dialect = _ALIASES.get(dialect, dialect)
    if dialect not in _NOW:
        raise SettingsError(
            f"idempotency_transaction: {dialect} is not supported; use PostgreSQL, MySQL, MariaDB "
            "or SQLite"
        )
    now = _NOW[dialect]
    return Statements(
        claim=f"INSERT INTO {TABLE} (id, record_key, {', '.join(_CLAIMED)}, format)"
        f" VALUES (:id, :record_key, {', '.join(f':{name}' for name in _CLAIMED)}, '')",
        take_over=f"UPDATE {TABLE} SET {', '.join(f'{name} = :{name}' for name in _CLAIMED)},"
        " format = '', outbox = NULL, finished_at = NULL, expires_at = NULL"
        " WHERE id = :id AND owner = :seen",
        finish=f"UPDATE {TABLE} SET turn = NULL, state = :state, format = :format, body = :body,"
        f" outbox = :outbox, finished_at = {now}, expires_at = {now} + :retention_ms"
        " WHERE id = :id AND owner = :owner",
        clear_outbox=f"UPDATE {TABLE} SET outbox = NULL WHERE id = :id AND owner = :owner",
        find=f"SELECT {', '.join(_SELECTED)}, {now} FROM {TABLE} WHERE id = :id",
        totals=f"SELECT COUNT(*), COALESCE(SUM(CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END), 0)"
        f" FROM {TABLE}",
        forget=f"DELETE FROM {TABLE} WHERE id >= :id AND id < :end",
        limit_steps=f"UPDATE {TABLE} SET expires_at = {now} + :retention_ms"
        f" WHERE id > :id AND id < :end AND expires_at > {now} + :retention_ms",
        forget_shown=f"DELETE FROM {TABLE} WHERE id = :id AND owner = :owner",
        purge_begin=_READ_COMMITTED.get(dialect, ""),
        expired=f"SELECT id, expires_at FROM {TABLE}"
        f" WHERE expires_at >= :after AND expires_at <= {now} AND outbox IS NULL"
        f" ORDER BY expires_at LIMIT :limit{_SKIP_LOCKED.get(dialect, '')}",
        overdue=f"SELECT id FROM {TABLE} WHERE expires_at <= {now} - :age_ms"
        " AND outbox IS NULL LIMIT 1",
        # Again by the time: a row of SQLite may have been taken over meanwhile.
        purge=f"DELETE {_BY_ID.get(dialect, f'FROM {TABLE}')} WHERE expires_at <= {now} AND id IN ",
        limit_wait="SET LOCAL lock_timeout = '5s'" if dialect == "postgresql" else "",
    )


def row_id(prefix: str, key: Key) -> str:
    """Returns the primary key of the row of `key`: hexadecimal, so that no collation matters.

    A key that may run again (``idempotency_until``) has a row for each of its messages.
    """
    name = f"{prefix}:{key} {key.message}" if key.message else f"{prefix}:{key}"
    return blake2b(name.encode(), digest_size=16).hexdigest()


def step_id(prefix: str, key: Key, step: str) -> str:
    """Returns the primary key of the row of a step of `key`; it begins with that of the key."""
    return row_id(prefix, key) + blake2b(step.encode(), digest_size=16).hexdigest()


def rows_of(prefix: str, key: Key) -> dict[str, str]:
    """Returns the range of primary keys of `key` and its steps, for the statement `forget`."""
    first = row_id(prefix, key)
    return {"id": first, "end": first + "g"}


def turn_id(prefix: str, key: Key) -> str | None:
    """Returns what the rows of all messages of `key` share until they are finished.

    It is unique, so that messages of a key that may run again run one after the other.
    """
    return row_id(prefix, key.turn) if key.message else None


def committed_without_outcome() -> TransactionError:
    """Returns the error for a row that cannot be claimed, and has no outcome."""
    return TransactionError(
        f"a row of {TABLE} was committed without an outcome: the connection commits each statement "
        "(autocommit), or a body has committed its transaction; forget the key to let it run again"
    )


class Claim(NamedTuple):
    """The execution that claims a row."""

    key: Key
    #: ``idempotency_key_prefix``.
    prefix: str
    task_id: str
    worker: str
    token: int
    attempt: int
    #: The step that has a row of its own; None for the key's row.
    step: str | None = None

    @property
    def id(self) -> str:
        """The primary key of the row."""
        if self.step is None:
            return row_id(self.prefix, self.key)
        return step_id(self.prefix, self.key, self.step)

    @property
    def values(self) -> dict[str, Any]:
        """The values of the statement `claim`, with a new owner."""
        key = self.key
        return {
            "id": self.id,
            "turn": turn_id(self.prefix, key) if self.step is None else None,
            "record_key": str(key),
            "owner": os.urandom(16).hex(),
            "state": CLAIMED,
            "task_id": self.task_id,
            "worker": self.worker,
            "token": self.token,
            "attempt": self.attempt,
            "fingerprint": key.fingerprint.hex(),
            "body": b"",
        }


class Ended(NamedTuple):
    """The outcome of an execution."""

    state: State
    format: str
    body: bytes
    retention_ms: int
    #: Messages to publish after the commit, as :mod:`celery_idempotent.executor.outbox` stores
    #: them.
    outbox: bytes | None = None


class Row(NamedTuple):
    """A committed row."""

    owner: str
    state: str
    task_id: str
    worker: str
    token: int
    attempt: int
    fingerprint: str
    format: str
    body: bytes
    #: Messages that the execution was to publish after its commit; None: they are published.
    outbox: bytes | None
    finished_at: int
    expires_at: int
    #: When it was read.
    now: int

    @classmethod
    def read(cls, values: Sequence[Any]) -> Row:
        """Returns the row that the statement `find` has selected.

        Raises:
            TransactionError: if the row has no outcome: it was not committed with one.
        """
        row = cls.read_any(values)
        if row.state == CLAIMED:
            raise committed_without_outcome()
        return row

    @classmethod
    def read_any(cls, values: Sequence[Any]) -> Row:
        """Returns the row, also one without an outcome, whose state is CLAIMED."""
        row = cls(*values)
        return row._replace(
            body=bytes(row.body),
            outbox=None if row.outbox is None else bytes(row.outbox),
            finished_at=row.finished_at or 0,
            expires_at=row.expires_at or 0,
        )

    @property
    def expired(self) -> bool:
        """Whether its retention has ended; that of a row without an outcome never does."""
        return 0 < self.expires_at <= self.now

    @property
    def delegates(self) -> bool:
        """Whether its task has replaced itself: another one gives the outcome."""
        return self.format.startswith("=")

    @property
    def remaining_ms(self) -> int:
        """The rest of its retention, in milliseconds."""
        return max(1, self.expires_at - self.now)

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
            body=self.body,
            decode=decode,
        )
