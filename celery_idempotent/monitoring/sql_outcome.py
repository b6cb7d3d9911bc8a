"""The outcome of a key in the user's database, for people: beside its record, or alone."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.key.key import Key
from celery_idempotent.monitoring import json_format
from celery_idempotent.sql.outcomes import CLAIMED, Row, committed_without_outcome
from celery_idempotent.store.inspection.scan import key_of


class SqlOutcome(NamedTuple):
    """A row of the table of outcomes, as it was read."""

    task: IdempotentTaskLike
    key: Key
    row: Row

    @property
    def name(self) -> str:
        """The name of the database, without secrets."""
        engine = self.task.idempotency_configuration.settings.transaction.engine
        return str(engine.name)

    def outcome_fields(self) -> dict[str, Any]:
        """Returns the outcome, as that of a record; decodes it."""
        if self.row.state == CLAIMED:
            return {"not_stored": str(committed_without_outcome())}
        codec = self.task.idempotency_configuration.executor.codec
        return json_format.outcome_fields(self.row.record(self.key, codec.decode))

    @property
    def finished_at(self) -> datetime:
        """When the transaction was about to be committed."""
        return _moment(self.row.finished_at)

    @property
    def expires_at(self) -> datetime:
        """When its retention ends."""
        return _moment(self.row.expires_at)

    @property
    def now(self) -> datetime:
        """The time of the database."""
        return _moment(self.row.now)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields but the outcome."""
        row = self.row
        return {
            "database": self.name,
            "state": row.state,
            "task_id": row.task_id,
            "worker": row.worker,
            "token": row.token,
            "attempt": row.attempt,
            "finished_at": self.finished_at.isoformat(),
            "expires_at": self.expires_at.isoformat(),
            "expired": row.expired,
        }


def sql_outcome(task: IdempotentTaskLike, key: Key) -> SqlOutcome | None:
    """Returns the outcome of `key` in the database of its task; None if there is none.

    Raises:
        StoreUnavailableError: if the database is unavailable.
    """
    configuration = task.idempotency_configuration
    database = configuration.settings.transaction
    if database is None:
        return None
    row = database.find(configuration.executor.store.config.prefix, key)
    return None if row is None else SqlOutcome(task, key, row)


def find_sql_outcome(tasks: Iterable[IdempotentTaskLike], text: str) -> SqlOutcome | None:
    """Returns the outcome of a key, written with or without its prefix; None if there is none.

    Raises:
        StoreUnavailableError: if the database is unavailable.
    """
    for task in tasks:
        key = key_of(text, task.idempotency_configuration.executor.store.config.prefix)
        if key is not None and key.task == task.name:
            return sql_outcome(task, key)
    return None


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1e3, tz=timezone.utc)
