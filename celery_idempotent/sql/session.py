"""The interface to a database: one connection, and one transaction at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Answer(NamedTuple):
    """What a statement returned."""

    rows: Sequence[Sequence[Any]]
    #: Rows that it has changed.
    changed: int


class Session(Protocol):
    """The transactions of one execution."""

    @property
    def connection(self) -> Any:
        """The connection, as the body uses it."""

    @property
    def active(self) -> bool:
        """Whether the transaction is open, and can be committed."""

    def begin(self, *, durable: bool = True) -> None:
        """Connects and begins a transaction.

        Args:
            durable: its commit must not depend on a transaction of the caller.

        Raises:
            TransactionError: inside a transaction of the caller.
        """

    def execute(self, statement: str, values: Mapping[str, Any]) -> Answer:
        """Executes a statement of :mod:`celery_idempotent.sql.outcomes`."""

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The functions to call after the commit, without those that may be lost.

        Empty if they are not known, as listeners of SQLAlchemy's events.
        """
        return []

    def drop_on_commit(self) -> None:
        """Removes the functions of `on_commit`."""

    def commit(self) -> None:
        """Commits, and returns the connection to its pool."""

    def rollback(self) -> None:
        """Rolls back, if a transaction is open, and returns the connection. Never raises."""

    def discard(self) -> None:
        """Closes the connection, whose state is unknown; the server rolls back. Never raises."""


class Engine(Protocol):
    """A database, by SQLAlchemy or Django."""

    #: Of the database, for messages; without secrets.
    name: str
    #: The kind of database, as SQLAlchemy or Django names it.
    dialect: str
    #: Creates the table.
    create_command: str
    #: Base class of the driver's errors, and that of a duplicate primary key.
    error: type[Exception]
    integrity_error: type[Exception]

    def session(self) -> Session:
        """Returns a session, which is not connected yet."""

    def release_connections(self) -> None:
        """Closes idle connections, so that processes that are forked later inherit none."""
