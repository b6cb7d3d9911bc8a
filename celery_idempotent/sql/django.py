"""Databases accessed through Django: see the interfaces `Engine` and `Session` in `sql.session`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction, utils

from celery_idempotent.errors import SettingsError, TransactionError
from celery_idempotent.sql import OPTION
from celery_idempotent.sql.session import StatementResult


@lru_cache
def _translated(statement: str) -> str:
    """Returns `statement` with parameters as Django writes them."""
    return re.sub(r":([a-z_0-9]+)", r"%(\1)s", statement)


class DjangoEngine:
    """The database of an alias in ``DATABASES``.

    Raises:
        SettingsError: if there is no such alias.
    """

    error: type[Exception] = utils.Error
    integrity_error: type[Exception] = utils.IntegrityError

    def __init__(self, alias: str) -> None:
        try:
            if alias not in connections:
                raise SettingsError(
                    f"{OPTION}: DATABASES has no alias {alias!r}; it has {', '.join(connections)}"
                )
            self.dialect = str(connections[alias].vendor)
        except ImproperlyConfigured as error:
            raise SettingsError(f"{OPTION} {alias!r}: {error}") from None
        if not connections.settings[alias]["AUTOCOMMIT"]:
            raise SettingsError(
                f"{OPTION}: DATABASES[{alias!r}] has AUTOCOMMIT = False, so "
                "atomic() does not commit: remove it"
            )
        self.name = alias
        self.create_command = (
            'add "celery_idempotent.contrib.django" to INSTALLED_APPS, and run: '
            f"manage.py migrate celery_idempotent --database {alias}"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DjangoEngine) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def session(self) -> DjangoSession:
        """Returns a session on this thread's connection."""
        return DjangoSession(self.name)

    def release_connections(self) -> None:
        """Closes the connection of this thread, unless the caller has a transaction on it."""
        if not connections[self.name].in_atomic_block:
            connections[self.name].close()


class DjangoSession:
    """An ``atomic()`` block on this thread's connection."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._atomic: Any = None
        #: The savepoint of the body.
        self._savepoint: str | None = None
        #: Number of ``on_commit`` functions that were registered before the block: a test case of
        #: Django, which is a transaction of its own, may have some.
        self._registered = 0

    @property
    def connection(self) -> Any:
        """Django's connection."""
        return connections[self._alias]

    def begin(self, *, durable: bool = True) -> None:
        """Enters the block, replacing a broken connection."""
        connection = self.connection
        if connection.errors_occurred and not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
        atomic = transaction.atomic(using=self._alias, durable=durable)
        try:
            atomic.__enter__()
        except RuntimeError as error:
            if not connection.in_atomic_block:
                raise
            raise TransactionError(
                f"{OPTION} {self._alias!r} cannot begin inside another transaction, "
                "which would decide whether the outcome is committed: call it outside of atomic() "
                "(under ATOMIC_REQUESTS: from a view with non_atomic_requests, or on_commit)"
            ) from error
        self._atomic = atomic
        self._registered = len(connection.run_on_commit)

    def begin_body(self) -> None:
        """Sets a savepoint; Django itself refuses to end a transaction inside ``atomic()``."""
        self._savepoint = transaction.savepoint(using=self._alias)

    def end_body(self) -> bool:
        """Releases the savepoint, unless the block is marked for rollback."""
        connection = self.connection
        if not connection.in_atomic_block or connection.needs_rollback:
            return False
        transaction.savepoint_commit(self._savepoint, using=self._alias)
        return True

    def execute(self, statement: str, values: Mapping[str, Any]) -> StatementResult:
        """Executes a statement."""
        with self.connection.cursor() as cursor:
            cursor.execute(_translated(statement), dict(values))
            return StatementResult(cursor.fetchall() if cursor.description else (), cursor.rowcount)

    @property
    def on_commit(self) -> list[Callable[[], Any]]:
        """The block's ``on_commit`` functions that are not robust."""
        own = self.connection.run_on_commit[self._registered :]
        return [func for _, func, robust in own if not robust]

    def drop_on_commit(self) -> None:
        """Removes the functions of `on_commit`, and leaves the robust ones."""
        # An entry is a tuple of savepoint ids, function, and whether the function is robust.
        registered = self.connection.run_on_commit
        before, own = registered[: self._registered], registered[self._registered :]
        self.connection.run_on_commit = [*before, *(entry for entry in own if entry[2])]

    def commit(self) -> None:
        """Leaves the block; Django runs the remaining ``on_commit`` functions."""
        self._atomic.__exit__(None, None, None)
        self._atomic = None

    def rollback(self) -> None:
        """Leaves the block with a rollback."""
        try:
            if self._atomic is not None and self.connection.in_atomic_block:
                self.connection.set_rollback(True)
                self._atomic.__exit__(None, None, None)
            self._atomic = None
        except Exception:
            self.discard()

    def discard(self) -> None:
        """Closes the connection; Django reopens it on next use."""
        with suppress(Exception):
            self.connection.close()
        with suppress(Exception):
            if self._atomic is not None and self.connection.in_atomic_block:
                self._atomic.__exit__(None, None, None)
        self._atomic = None
