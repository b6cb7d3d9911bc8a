"""The interfaces that `sql.django` and `sql.sqlalchemy` implement: an engine and its sessions.

A session has one connection, and one transaction at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class StatementResult(NamedTuple):
    """The result of a statement."""

    rows: Sequence[Sequence[Any]]
    #: The number of rows that the statement changed.
    changed: int


class Session(Protocol):
    """The transactions of one execution."""

    @property
    def connection(self) -> Any:
        """The connection, as the body uses it."""

    def begin(self, *, durable: bool = True) -> None:
        """Connects and begins a transaction.

        Args:
            durable: whether to refuse to join a transaction of the caller.

        Raises:
            TransactionError: if it is refused inside a transaction of the caller.
        """

    def begin_body(self) -> None:
        """Sets a savepoint for the body, which may not end the transaction itself."""

    def end_body(self) -> bool:
        """Releases the savepoint; returns False if the body has ended the transaction, or tried to.

        Raises:
            Exception: the driver's error; also if the driver has ended the transaction.
        """

    def execute(self, statement: str, values: Mapping[str, Any]) -> StatementResult:
        """Executes a statement of :mod:`celery_idempotent.sql.outcomes`."""

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The functions to call after the commit, which the outbox stores with the outcome.

        Without those that may be lost (``robust=True`` in Django); empty for SQLAlchemy, whose
        listeners of events are unknown.
        """
        return []

    def drop_on_commit(self) -> None:
        """Removes the functions of `on_commit`, so that the commit does not call them too."""

    def commit(self) -> None:
        """Commits and returns the connection to its pool."""

    def rollback(self) -> None:
        """Rolls back any open transaction and returns the connection. Never raises."""

    def discard(self) -> None:
        """Closes the connection, whose state is unknown; the server rolls back. Never raises."""


class Engine(Protocol):
    """A database, accessed through SQLAlchemy or Django."""

    #: The database's name for messages, without secrets.
    name: str
    #: The kind of database, as SQLAlchemy or Django names it.
    dialect: str
    #: The command that creates the table of outcomes, for the message that it is missing.
    create_command: str
    #: Base class of the driver's errors, and the class for a duplicate primary key.
    error: type[Exception]
    integrity_error: type[Exception]

    def session(self) -> Session:
        """Returns a session that is not yet connected."""

    def release_connections(self) -> None:
        """Closes idle connections, so that processes that are forked later inherit none."""
