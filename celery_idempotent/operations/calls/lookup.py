"""Finds what is stored for a call: its record in Redis, and its row in the user's database."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, utc
from celery_idempotent.core.store.scan import key_of
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.records.query import read_view
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.sql import database_of
from celery_idempotent.sql.outcomes import CLAIMED, Row, committed_without_outcome


class SqlOutcome(NamedTuple):
    """A row of the table of outcomes, with the task and the key that it belongs to."""

    task: IdempotentTaskLike
    key: Key
    row: Row

    @property
    def name(self) -> str:
        """The name of the database, without secrets."""
        return str(database_of(self.task).engine.name)

    def outcome_fields(self) -> dict[str, Any]:
        """Decodes the outcome; returns it like a record's."""
        if self.row.state == CLAIMED:
            return {"not_stored": str(committed_without_outcome())}
        return formatting.outcome_fields(self.record)

    @property
    def record(self) -> Record:
        """The record that Redis would have for the row, which must have an outcome."""
        codec = self.task.idempotency_configuration.executor.codec
        return self.row.record(self.key, codec.view)

    @property
    def finished_at(self) -> datetime:
        """When the transaction was about to be committed."""
        return utc(self.row.finished_at / 1e3)

    @property
    def expires_at(self) -> datetime:
        """When its retention ends."""
        return utc(self.row.expires_at / 1e3)

    @property
    def now(self) -> datetime:
        """The database's clock when the row was read."""
        return utc(self.row.now / 1e3)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields except the outcome."""
        names = ("state", "task_id", "worker", "token", "attempt")
        return {
            "database": self.name,
            **{name: getattr(self.row, name) for name in names},
            "finished_at": self.finished_at.isoformat(),
            "expires_at": self.expires_at.isoformat(),
            "expired": self.row.expired,
        }


class Target(NamedTuple):
    """A key that a user has named, and what is stored under it."""

    key: Key
    #: The record of the key; None if Redis has none.
    view: RecordView | None
    #: The row of the key; None if the database has none, or before `with_outcome`.
    outcome: SqlOutcome | None = None
    #: The task id that the user gave, if it is that of a duplicate; else empty.
    duplicate: str = ""

    def with_outcome(self, tasks: Iterable[IdempotentTaskLike]) -> Target:
        """Returns this target with its row, which is read now.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        return self._replace(outcome=find_outcome(tasks, self.key))


def find_outcome(tasks: Iterable[IdempotentTaskLike], name: Key | str) -> SqlOutcome | None:
    """Returns the outcome of a key in the database of its task; None if there is none.

    Args:
        name: the key, or its text with or without its prefix.

    Raises:
        StoreUnavailableError: if the database is unavailable.
    """
    for task in tasks:
        configuration = task.idempotency_configuration
        database = database_of(task)
        prefix = configuration.executor.store.config.prefix
        key = name if isinstance(name, Key) else key_of(name, prefix)
        if key is not None and key.task == task.name:
            row = None if database is None else database.find(prefix, key)
            return None if row is None else SqlOutcome(task, key, row)
    return None


def outcome_or_error(
    tasks: Iterable[IdempotentTaskLike], name: Key | str
) -> SqlOutcome | IdempotencyError | None:
    """As :func:`find_outcome`, but returns the error of an unavailable database."""
    try:
        return find_outcome(tasks, name)
    except IdempotencyError as error:
        return error


def record_document(
    key: Key,
    view: RecordView | None,
    outcome: SqlOutcome | IdempotencyError | None,
    *,
    results: bool = True,
) -> dict[str, Any]:
    """Returns a record, or a row without a record, as a JSON object.

    Args:
        results: whether to include the result or the error.
    """
    record = view.record if view else None
    document = formatting.view_fields(view) if view else formatting.key_fields(key, "ABSENT")
    fields = formatting.outcome_fields(record) if results else {}
    if isinstance(outcome, SqlOutcome):
        if results and not fields:
            fields = outcome.outcome_fields()
        fields["sql_outcome"] = outcome.to_json()
    elif outcome is not None:
        fields["sql_outcome"] = {"error": str(outcome)}
    return document | fields


def find_record(
    tasks: Iterable[IdempotentTaskLike],
    text: str,
    read: Callable[..., RecordView | None] = read_view,
) -> RecordView | None:
    """Returns the record of a key, given with or without its prefix.

    Args:
        read: reads a key of a store.
    """
    # If the prefix of one store equals the name of a task in another store, `text` is a name with a
    # prefix in the first and a key in the second. The stores of tasks named in `text` come first.
    for store in app_tasks.stores(sorted(tasks, key=lambda task: f"{task.name}:" not in text)):
        key = key_of(text, store.config.prefix)
        view = None if key is None else read(store, key)
        if view is not None:
            return view
    return None
