"""Databases accessed through SQLAlchemy: see `Engine` and `Session` in `sql.session`.

SQLAlchemy opens a connection for each transaction. An idempotent call inside a transaction would
therefore commit independently of it, and wait for ever for the locks of its caller. So transactions
nest here as in Django: one that begins inside another of the same engine and context joins it or is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy
from sqlalchemy import exc

from celery_idempotent.errors import SettingsError, TransactionError
from celery_idempotent.sql import OPTION
from celery_idempotent.sql.session import Session, StatementResult

#: The process id under which each engine was last used, and its pool's connections were opened.
_processes: WeakKeyDictionary[sqlalchemy.Engine, int] = WeakKeyDictionary()

#: The sessions with an open transaction in this context, innermost last.
_open: ContextVar[tuple[SQLAlchemySession, ...]] = ContextVar("idempotent_sessions", default=())

_text = lru_cache(sqlalchemy.text)


class SQLAlchemyEngine:
    """The database of a SQLAlchemy engine.

    Raises:
        SettingsError: if `engine` is not a SQLAlchemy engine.
    """

    error: type[Exception] = exc.SQLAlchemyError
    integrity_error: type[Exception] = exc.IntegrityError
    create_command = (
        "add celery_idempotent.contrib.sqlalchemy.metadata to the target_metadata of Alembic, or "
        "call its create_all(engine)"
    )

    def __init__(self, engine: Any) -> None:
        if not isinstance(engine, sqlalchemy.Engine):
            raise SettingsError(
                f"{OPTION} must be a (blocking) SQLAlchemy Engine, the path of one, "
                f"or the alias of a Django database, not {type(engine).__name__}"
            )
        self._engine = engine
        #: The name of the database; the dialect for one without a name.
        self.name = engine.url.database or engine.dialect.name
        self.dialect = engine.dialect.name

    def __eq__(self, other: object) -> bool:
        """Whether both are one engine or views of it (``execution_options``), sharing a pool."""
        return isinstance(other, SQLAlchemyEngine) and self._engine.pool is other._engine.pool

    def __hash__(self) -> int:
        return hash(self._engine.url)

    def session(self) -> SQLAlchemySession:
        """Returns a session that is not yet connected."""
        process = os.getpid()
        if _processes.setdefault(self._engine, process) != process:
            self._engine.dispose(close=False)  # forked: the parent uses those connections
            _processes[self._engine] = process
        return SQLAlchemySession(self._engine)

    def release_connections(self) -> None:
        """Closes idle connections."""
        self._engine.dispose()


class SQLAlchemySession(Session):
    """Transactions on a connection of the pool or, inside another one, on that one's connection."""

    #: A `sqlalchemy.Connection`, while the transaction is open.
    connection: Any = None

    def __init__(self, engine: sqlalchemy.Engine) -> None:
        self.engine = engine
        self._transaction: Any = None
        #: The savepoint of the body while it runs; else None.
        self._savepoint: Any = None
        #: Whether the body has tried to commit the transaction, which `_refuse` has prevented.
        self._refused = False
        #: The enclosing session, whose connection this one uses; None if it has its own.
        self._outer: SQLAlchemySession | None = None

    @property
    def is_open(self) -> bool:
        """Whether the transaction is open."""
        return self._transaction is not None and self._transaction.is_active

    def begin(self, *, durable: bool = True) -> None:
        """Connects and begins; inside another transaction of the engine, sets a savepoint."""
        sessions = tuple(each for each in _open.get() if each.is_open)
        outer = next((each for each in sessions if each.engine.pool is self.engine.pool), None)
        if outer is None:
            self.connection = self.engine.connect()
            self._transaction = self.connection.begin()
        else:
            self._check_nesting(outer, durable)
            self._outer, self.connection = outer, outer.connection
            self._transaction = outer.connection.begin_nested()
        _open.set((*sessions, self))

    def _check_nesting(self, outer: SQLAlchemySession, durable: bool) -> None:
        name = SQLAlchemyEngine(self.engine).name
        if durable:
            raise TransactionError(
                f"{OPTION} {name!r} cannot begin inside another transaction of this "
                "engine, because it could wait for that one's locks for ever: publish the task, or "
                "call it as a function, which joins that transaction; call functions, blocks and "
                "batches with a key before or after it"
            )
        if self.engine.get_execution_options() != outer.engine.get_execution_options():
            raise TransactionError(
                f"a plain call cannot join the transaction of {name!r} that is open: it was begun "
                f"with other execution options; set {OPTION} to the same engine"
            )

    def begin_body(self) -> None:
        """Sets a savepoint, in which an ORM ``Session`` nests, and refuses commits from now on.

        Inside another session, `begin` has set the savepoint, and that session refuses commits.
        """
        if self._outer is not None:
            self._savepoint = self._transaction
            return
        self._savepoint = self.connection.begin_nested()
        sqlalchemy.event.listen(self.connection, "commit", self._refuse)

    def _refuse(self, connection: sqlalchemy.Connection) -> None:
        """Raises an error if the body runs; SQLAlchemy calls it before each commit."""
        if self._savepoint is None:
            return
        self._refused = True
        name = SQLAlchemyEngine(self.engine).name
        raise TransactionError(
            f"{OPTION} {name!r}: the body must not commit its transaction, which is "
            "committed with the outcome; use savepoints: connection.begin_nested(), or "
            "Session(bind=connection)"
        )

    def end_body(self) -> bool:
        """Releases the savepoint, and those in it that the body has left open."""
        body, self._savepoint = self._savepoint, None
        if self._refused or not body.is_active:
            return False
        while body.is_active:
            self.connection.get_nested_transaction().commit()
        return True

    def execute(self, statement: str, values: Mapping[str, Any]) -> StatementResult:
        """Executes a statement."""
        result = self.connection.execute(_text(statement), dict(values))
        return StatementResult(result.all() if result.returns_rows else (), result.rowcount)

    def drop_on_commit(self) -> None:
        """Does nothing, since `on_commit` is empty."""

    def commit(self) -> None:
        """Commits and returns the connection."""
        if self._outer is None:
            self._transaction.commit()
        self._close()

    def rollback(self) -> None:
        """Rolls back and returns the connection; closes it if its state is unknown."""
        self._savepoint = None
        if self._refused:
            self.discard()
            return
        try:
            if self._transaction is not None:
                self._transaction.close()  # rolls back
            self._close()
        except Exception:
            self.discard()

    def discard(self) -> None:
        """Closes the connection."""
        self._savepoint = None
        with suppress(Exception):
            self.connection.invalidate()
        with suppress(Exception):
            self._close()

    def _close(self) -> None:
        _open.set(tuple(session for session in _open.get() if session is not self))
        connection, self.connection, self._transaction = self.connection, None, None
        self._refused = False
        outer, self._outer = self._outer, None
        if connection is not None and outer is None:
            connection.close()
