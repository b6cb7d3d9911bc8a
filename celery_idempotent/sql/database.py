"""The database in which transactions store outcomes: its engine, and operations on its table.

`sql.transaction` uses it for each execution; the command line and the dashboard, to find, forget
and purge rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from celery_idempotent.core.key import Key
from celery_idempotent.errors import SettingsError, StoreUnavailableError, TransactionError
from celery_idempotent.settings import imported
from celery_idempotent.sql import OPTION
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import TABLE, Claim, Row, Statements, row_id
from celery_idempotent.sql.session import Engine, Session

#: Cached because each step of a body creates a Database.
_statements = lru_cache(Statements)


class _KeepRow(Exception):
    """Raised in `forget` to leave its transaction with a rollback, which restores the row."""


@dataclass(frozen=True)
class Database:
    """A database, whose engine is imported at first use: its module may import the task's."""

    #: A SQLAlchemy engine, the path of one, or a Django database alias.
    source: Any

    def __repr__(self) -> str:
        return f"Database({self.source!r})" if isinstance(self.source, str) else "Database(Engine)"

    @cached_property
    def engine(self) -> Engine:
        """The SQLAlchemy or Django engine of the database.

        Raises:
            SettingsError: if there is no such database.
        """
        source = self.source
        if isinstance(source, str) and not (":" in source or "." in source):
            try:
                from celery_idempotent.sql.django import DjangoEngine
            except ImportError:
                raise SettingsError(
                    f"{OPTION} {source!r} is the alias of a Django database, and Django is not "
                    "installed; a SQLAlchemy engine is named by its path, such as 'shop.db:engine'"
                ) from None
            return DjangoEngine(source)
        if isinstance(source, str):
            source = imported(OPTION, source)
        from celery_idempotent.sql.sqlalchemy import SQLAlchemyEngine

        return SQLAlchemyEngine(source)

    @cached_property
    def statements(self) -> Statements:
        """The statements of the engine's dialect.

        Raises:
            SettingsError: if the dialect is not supported.
        """
        return _statements(self.engine.dialect)

    @contextmanager
    def plain_transaction(self, *, durable: bool = False) -> Iterator[Session]:
        """A transaction without an outcome; commits on exit, or rolls back after an error.

        Args:
            durable: whether to refuse to begin inside a transaction of the caller, rather than join
                it.
        """
        session = self.engine.session()
        try:
            session.begin(durable=durable)
            if not durable:
                session.begin_body()
            yield session
            if not durable:
                self.end_body(session)
            session.commit()
        except BaseException:
            session.rollback()
            raise

    def end_body(self, session: Session) -> None:
        """Releases the savepoint of the body, which protects the transaction from the body.

        Raises:
            TransactionError: if the body has ended the transaction.
            Exception: the driver's error, if it is transient.
        """
        cause = None
        try:
            if session.end_body():
                return
        except self.engine.error as error:
            if is_transient(error):
                raise
            cause = error
        raise self.has_ended() from cause

    def has_ended(self) -> TransactionError:
        """Returns the error for a body that has ended its transaction."""
        return TransactionError(
            f"{OPTION} {self.engine.name!r}: the body has ended its transaction, or "
            "gone on after an error in it, so its outcome cannot be committed with it; use "
            "savepoints (begin_nested(), or a nested atomic()) for parts that may fail"
        )

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A separate transaction, which refuses to join one of the caller.

        Raises:
            StoreUnavailableError: if the driver raises in it.
        """
        engine = self.engine
        try:
            with self.plain_transaction(durable=True) as session:
                yield session
        except engine.error as error:
            raise self.unavailable(error) from error

    def clear_outbox(self, row: Row | Claim) -> None:
        """Marks the messages of a row as published, unless another execution owns the row now.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        self._execute(self.statements.clear_outbox, {"id": row.id, "owner": row.owner})

    def purge(self, limit: int, after: int = 0) -> tuple[int, int]:
        """Deletes up to `limit` expired rows in one transaction, oldest first.

        Rows with unpublished messages are kept: the next call with their key publishes these.

        Args:
            after: the expiry time of the last row of the previous batch. The index still has the
                rows that were deleted since the oldest open transaction began, and without this
                limit each batch would read all of them.

        Returns:
            The number of expired rows found, and the expiry time of the last one.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        with self.transaction() as session:
            if self.statements.purge_begin:
                session.execute(self.statements.purge_begin, {})
            rows = session.execute(self.statements.expired, {"limit": limit, "after": after}).rows
            if rows:
                ids = {f"id{number}": row[0] for number, row in enumerate(rows)}
                names = ", ".join(f":{name}" for name in ids)
                session.execute(f"{self.statements.purge}({names})", ids)
        return len(rows), rows[-1][1] if rows else after

    def find(self, prefix: str, key: Key) -> Row | None:
        """Returns the committed row of `key`, even one without an outcome.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        rows = self._execute(self.statements.find, {"id": row_id(prefix, key)})
        return Row.read(rows[0]) if rows else None

    def forget(
        self, prefix: str, key: Key, forget_record: Callable[[], str], owner: str = ""
    ) -> str:
        """Deletes the row of `key` and its record; if one fails, nothing is forgotten.

        The transaction is committed after `forget_record`. A failure in between leaves the row, and
        duplicates get its outcome. Other transactions that claim the row wait for this one to end.

        Args:
            forget_record: as :meth:`Executor.forget`.
            owner: the owner of the row that was shown, which is kept if another owns it now; empty
                deletes any row.

        Returns:
            As :meth:`Executor.forget`.

        Raises:
            StoreUnavailableError: if Redis or the database is unavailable.
        """
        values, case = {"id": row_id(prefix, key)}, "changed"
        with suppress(_KeepRow), self.transaction() as session:
            if owner:
                shown = {**values, "owner": owner}
                deleted = session.execute(self.statements.forget_shown, shown).changed
                if not deleted and session.execute(self.statements.find, values).rows:
                    raise _KeepRow
            else:
                deleted = session.execute(self.statements.forget, values).changed
            case = forget_record()
            if case not in ("ok", "absent"):
                raise _KeepRow
            case = "ok" if deleted else case
        return case

    def count(self) -> tuple[int, int]:
        """Returns the numbers of all rows and of expired ones. Reads the whole table.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        ((rows, expired),) = self._execute(self.statements.totals, {})
        return int(rows), int(expired)

    def purge_is_overdue(self, seconds: float) -> bool:
        """Returns whether a row expired more than `seconds` ago. Reads one row, using an index.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        return bool(self._execute(self.statements.overdue, {"age_ms": round(seconds * 1000)}))

    def _execute(self, statement: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        with self.transaction() as session:
            return session.execute(statement, values).rows

    def unavailable(self, error: Exception) -> StoreUnavailableError:
        """Returns the error for a database that cannot be used.

        It omits the driver's message, which may quote hosts, users and values.
        """
        kind = type(error).__name__
        create = self.engine.create_command
        hint = "" if is_transient(error) else f"; if it has no table {TABLE}: {create}"
        return StoreUnavailableError(
            f"the database {self.engine.name} ({OPTION}) raised {kind}{hint}"
        )

    def check(self) -> None:
        """Checks that the table exists and that a transaction can be rolled back.

        Raises:
            SettingsError: if the table is missing, or the connection commits each statement.
            StoreUnavailableError: if the database is unavailable.
        """
        engine, session = self.engine, self.engine.session()
        key = Key("check", os.urandom(16).hex())
        try:
            session.begin()
            session.execute(self.statements.claim, Claim.of(key, "")._asdict())
            session.rollback()
            with self.plain_transaction(durable=True) as session:
                remaining = session.execute(self.statements.forget, {"id": row_id("", key)}).changed
        except engine.error as error:
            session.rollback()
            if is_transient(error):
                raise self.unavailable(error) from error
            raise SettingsError(
                f"{OPTION}: the table {TABLE} of the database {engine.name} cannot "
                f"be used ({type(error).__name__}); create it: {engine.create_command}"
            ) from error
        finally:
            engine.release_connections()
        if remaining:
            raise SettingsError(
                f"{OPTION}: the database {engine.name} does not roll back: use a "
                "connection without autocommit, and tables of a transactional storage engine"
            )
