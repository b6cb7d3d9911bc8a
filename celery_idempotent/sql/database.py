"""The database that ``idempotency_transaction`` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.errors import SettingsError, StoreUnavailableError
from celery_idempotent.key.key import Key
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import (
    CLAIMED,
    TABLE,
    Claim,
    Row,
    Statements,
    row_id,
    rows_of,
    statements,
)
from celery_idempotent.sql.session import Engine
from celery_idempotent.sql.transaction import Transaction

#: The databases that steps have used in this process. No option of a task names them.
step_databases: set[Database] = set()


class Database:
    """A database, resolved at first use, since its module may import that of the task.

    Args:
        source: a SQLAlchemy engine, the path of one, or a Django alias.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Database) and self.source == other.source

    def __hash__(self) -> int:
        return hash(self.source)

    def __repr__(self) -> str:
        return f"Database({self.source!r})" if isinstance(self.source, str) else "Database(Engine)"

    @cached_property
    def engine(self) -> Engine:
        """The database by SQLAlchemy or Django.

        Raises:
            SettingsError: if there is no such database.
        """
        source = self.source
        if isinstance(source, str) and not (":" in source or "." in source):
            try:
                from celery_idempotent.sql.django import DjangoEngine
            except ImportError:
                raise SettingsError(
                    f"idempotency_transaction {source!r} is the alias of a Django database, and "
                    "Django is not installed; a SQLAlchemy engine is named by its path, such as "
                    "'shop.db:engine'"
                ) from None
            return DjangoEngine(source)
        if isinstance(source, str):
            try:
                source = symbol_by_name(source)
            except (ImportError, AttributeError, ValueError) as error:
                raise SettingsError(
                    f"idempotency_transaction {source!r} cannot be imported: {type(error).__name__}"
                ) from None
        from celery_idempotent.sql.sqlalchemy import SQLAlchemyEngine

        return SQLAlchemyEngine(source)

    @cached_property
    def statements(self) -> Statements:
        """The statements of its dialect.

        Raises:
            SettingsError: if the dialect is not supported.
        """
        return statements(self.engine.dialect)

    def transaction(self, claim: Claim, may_replace: Callable[[Row], bool]) -> Transaction:
        """Returns a transaction, which has not begun yet."""
        return Transaction(self, claim, may_replace)

    def forget(
        self,
        prefix: str,
        key: Key,
        owner: str = "",
        before_commit: Callable[[], bool] = lambda: True,
    ) -> bool | None:
        """Deletes the row of `key`, and those of its steps, in one transaction.

        Other transactions that claim the row wait for the end of this one.

        Args:
            owner: of the row that was shown: nothing is deleted if it is another one now.
            before_commit: is called when the rows are deleted; returns whether to commit that.

        Returns:
            Whether there were rows; None if they are kept.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        rows, session, statements = rows_of(prefix, key), self.engine.session(), self.statements
        try:
            session.begin()
            deleted = 0
            if owner:
                shown = {"id": rows["id"], "owner": owner}
                deleted = session.execute(statements.forget_shown, shown).changed
                if not deleted and session.execute(statements.find, {"id": rows["id"]}).rows:
                    session.rollback()
                    return None
            deleted += session.execute(statements.forget, rows).changed
            if not before_commit():
                session.rollback()
                return None
            session.commit()
        except self.engine.error as error:
            session.rollback()
            raise self.unavailable(error) from error
        except BaseException:
            session.rollback()
            raise
        return deleted > 0

    def clear_outbox(self, claim: Claim, owner: str) -> None:
        """Notes that the messages of a row were published.

        Args:
            owner: of the row; if it is another one now, nothing is done.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        self._execute(self.statements.clear_outbox, {"id": claim.id, "owner": owner})

    def limit_steps(self, prefix: str, key: Key, retention_ms: int) -> None:
        """Lets the rows of the steps of `key` expire in `retention_ms` at the latest.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        values = {**rows_of(prefix, key), "retention_ms": retention_ms}
        self._execute(self.statements.limit_steps, values)

    def purge(self, limit: int, after: int = 0) -> tuple[int, int]:
        """Deletes up to `limit` expired rows in one transaction, oldest first.

        Rows whose messages were not published are kept: the next call with their key publishes
        them.

        Args:
            after: when the last row of the batch before has expired. Without it, each batch would
                pass by all rows that were deleted since the oldest open transaction began.

        Returns:
            How many it found, and when the last one has expired.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        session = self.engine.session()
        try:
            session.begin()
            if self.statements.purge_begin:
                session.execute(self.statements.purge_begin, {})
            rows = session.execute(self.statements.expired, {"limit": limit, "after": after}).rows
            if rows:
                ids = {f"id{number}": row[0] for number, row in enumerate(rows)}
                names = ", ".join(f":{name}" for name in ids)
                session.execute(f"{self.statements.purge}({names})", ids)
            session.commit()
        except self.engine.error as error:
            session.rollback()
            raise self.unavailable(error) from error
        return len(rows), rows[-1][1] if rows else after

    def find(self, prefix: str, key: Key) -> Row | None:
        """Returns the committed row of `key`, for people: also one without an outcome.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        rows = self._execute(self.statements.find, {"id": row_id(prefix, key)})
        return Row.read_any(rows[0]) if rows else None

    def count(self) -> tuple[int, int]:
        """Returns the number of rows, and of those that have expired. Reads the whole table.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        ((rows, expired),) = self._execute(self.statements.totals, {})
        return int(rows), int(expired)

    def purge_is_overdue(self, seconds: float) -> bool:
        """Returns whether a row expired more than `seconds` ago. Reads one row, by its index.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        return bool(self._execute(self.statements.overdue, {"age_ms": round(seconds * 1000)}))

    def _execute(self, statement: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        session = self.engine.session()
        try:
            session.begin()
            rows = session.execute(statement, values).rows
            session.commit()
        except self.engine.error as error:
            session.rollback()
            raise self.unavailable(error) from error
        return rows

    def unavailable(self, error: Exception) -> StoreUnavailableError:
        """Returns the error for a database that cannot be used, without the driver's message.

        That may quote hosts, users and values.
        """
        kind = type(error).__name__
        create = self.engine.create_command
        hint = "" if is_transient(error) else f"; if it has no table {TABLE}: {create}"
        return StoreUnavailableError(
            f"the database {self.engine.name} (idempotency_transaction) raised {kind}{hint}"
        )

    def check(self) -> None:
        """Checks the table, and that a transaction can be rolled back.

        Raises:
            SettingsError: if the table is missing, or the connection commits each statement.
            StoreUnavailableError: if the database is unavailable.
        """
        engine, session = self.engine, self.engine.session()
        probe = os.urandom(16).hex()
        values: dict[str, Any] = {"id": probe, "owner": probe, "state": CLAIMED}
        values |= dict.fromkeys(("record_key", "task_id", "worker", "fingerprint"), "")
        values |= {"turn": None, "token": 0, "attempt": 0, "body": b""}
        try:
            session.begin()
            session.execute(self.statements.claim, values)
            session.rollback()
            session.begin()
            kept = session.execute(self.statements.find, {"id": probe}).rows
            if kept:
                session.execute(self.statements.forget, {"id": probe, "end": probe + "g"})
            session.commit()
        except engine.error as error:
            session.rollback()
            if is_transient(error):
                raise self.unavailable(error) from error
            raise SettingsError(
                f"idempotency_transaction: the table {TABLE} of the database {engine.name} cannot "
                f"be used ({type(error).__name__}); create it: {engine.create_command}"
            ) from error
        finally:
            engine.release_connections()
        if kept:
            raise SettingsError(
                f"idempotency_transaction: the database {engine.name} does not roll back: use a "
                "connection without autocommit, and tables of a transactional storage engine"
            )


def forget_rows(
    database: Database | None,
    step_rows_in: Iterable[Database],
    prefix: str,
    key: Key,
    owner: str,
    before_commit: Callable[[], bool],
) -> bool | None:
    """As :meth:`Database.forget`, in all databases that may have rows of `key`.

    Args:
        database: may have the row of the key itself.
        step_rows_in: have rows of steps, as may those that steps have used in this process.
        owner: of the row that was shown.
    """
    own = [] if database is None else [database]
    # Each once: a path and an engine may name the same.
    named = {each.engine: each for each in (*own, *step_databases, *step_rows_in)}
    had_rows = False

    def forget(databases: Sequence[Database], owner: str) -> bool:
        """Returns whether to commit."""
        nonlocal had_rows
        if not databases:
            return before_commit()
        deleted = databases[0].forget(prefix, key, owner, lambda: forget(databases[1:], ""))
        had_rows |= bool(deleted)
        return deleted is not None

    return had_rows if forget([*named.values()], owner) else None
