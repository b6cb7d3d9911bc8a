"""Forgets a record on a person's request: only if it is unchanged, and not running."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.events import table
from celery_idempotent.events.report import About, log_extra, report
from celery_idempotent.key.key import Key
from celery_idempotent.monitoring.sql_outcome import SqlOutcome
from celery_idempotent.record.record import State
from celery_idempotent.sql.database import Database, forget_rows
from celery_idempotent.store.commands import UNREADABLE
from celery_idempotent.store.inspection.record_query import RecordView, read_view

logger = logging.getLogger(__name__)

FORGOTTEN, RUNNING, CHANGED, ABSENT = "forgotten", "running", "changed", "absent"


def forget(
    view: RecordView,
    tasks: Sequence[IdempotentTaskLike],
    *,
    user: str,
    force: bool = False,
    outcome: SqlOutcome | None = None,
    databases: Iterable[Database] = (),
) -> str:
    """Deletes a record and its rows; logs it, and sends the signal ``forgotten``.

    The record must be as in `view`, and the row as in `outcome`.

    Args:
        tasks: all idempotent tasks of the app.
        user: who requests it.
        force: also forget it while it is running. Its execution is not stopped.
        outcome: the row that was shown; without it, any is deleted.
        databases: have rows of steps, besides those that the tasks name.

    Returns:
        FORGOTTEN, RUNNING, CHANGED or ABSENT.

    Raises:
        StoreUnavailableError: if Redis or the database is unavailable.
    """
    if not force and has_valid_lease(view):
        return RUNNING
    owners = [task for task in tasks if task.idempotency_configuration.executor.store == view.store]
    executor = owners[0].idempotency_configuration.executor
    record = view.record
    sender = next((task for task in owners if task.name == view.key.task), None)
    database = sender.idempotency_configuration.settings.transaction if sender else None
    owner = outcome.row.owner if outcome else ""
    shown = UNREADABLE if record is None else record
    named = {*app_tasks.databases(tasks), *databases}
    case = executor.forget(view.key, shown, database, owner, step_rows_in=named)
    if case != "ok":
        return {"changed": CHANGED, "absent": ABSENT}[case]
    if record is None:
        _report(view.key, sender, user, "unreadable")
    else:
        about = f"{record.state}, of task {record.task_id!r}"
        _report(view.key, sender, user, about, record.task_id, record.label, record.token)
    return FORGOTTEN


def forget_row(
    outcome: SqlOutcome,
    tasks: Sequence[IdempotentTaskLike],
    *,
    user: str,
    databases: Iterable[Database] = (),
) -> str:
    """Deletes a row whose key has no record, as :func:`forget` does."""
    configuration, row = outcome.task.idempotency_configuration, outcome.row
    executor, database = configuration.executor, configuration.settings.transaction

    def is_alone() -> bool:
        return read_view(executor.store, outcome.key) is None

    named = {*app_tasks.databases(tasks), *databases}
    prefix = executor.store.config.prefix
    deleted = forget_rows(database, named, prefix, outcome.key, row.owner, is_alone)
    if not deleted:
        return CHANGED if deleted is None else ABSENT
    about = f"{row.state} in the database alone, of task {row.task_id!r}"
    _report(outcome.key, outcome.task, user, about, row.task_id, token=row.token)
    return FORGOTTEN


def _report(
    key: Key,
    sender: IdempotentTaskLike | None,
    user: str,
    about: str,
    task_id: str = "",
    label: str = "",
    token: int | None = None,
) -> None:
    extra = log_extra(str(key), task_id=task_id, label=label, token=token)
    logger.info("%r has forgotten the record %s (%s)", user, key, about, extra=extra)
    report(table.FORGOTTEN, About(sender, key.task, task_id, key, label), user=user)


def has_valid_lease(view: RecordView) -> bool:
    """Whether the record is running. Reads it again: a heartbeat extends the lease meanwhile."""
    if not _is_started(view):
        return False
    current = read_view(view.store, view.key) or view
    deadline = None if current.record is None else current.record.deadline
    return _is_started(current) and deadline is not None and deadline > current.now


def _is_started(view: RecordView) -> bool:
    return view.record is not None and view.record.state is State.STARTED
