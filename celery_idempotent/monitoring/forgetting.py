"""Forgets a record on request, if it is unchanged and not running."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.events import table
from celery_idempotent.events.report import About, report
from celery_idempotent.key.key import Key
from celery_idempotent.monitoring.lookup import SqlOutcome
from celery_idempotent.record.record import State
from celery_idempotent.sql.database import Database
from celery_idempotent.store.commands import NO_RECORD, UNREADABLE
from celery_idempotent.store.inspection.record_query import read_view
from celery_idempotent.store.inspection.record_reader import RecordView

#: The last two are replies of lua/forget.lua.
FORGOTTEN, RUNNING, CHANGED, ABSENT = "forgotten", "running", "changed", "absent"


def forget(
    key: Key,
    view: RecordView | None,
    tasks: Sequence[IdempotentTaskLike],
    *,
    user: str,
    force: bool = False,
    outcome: SqlOutcome | None = None,
    databases: Iterable[Database] = (),
) -> str:
    """Deletes a record and its rows, logs it, and sends the signal ``forgotten``.

    The record must still match `view`, and the row `outcome`.

    Args:
        view: None if the key had no record.
        tasks: all idempotent tasks of the app.
        user: who requests it.
        force: also forget a running call, without stopping its execution.
        outcome: the row that was shown; None deletes any.
        databases: databases with rows of steps, besides those of the tasks.

    Returns:
        FORGOTTEN, RUNNING, CHANGED or ABSENT.

    Raises:
        StoreUnavailableError: if Redis or the database is unavailable.
    """
    if view is not None:
        if not force and _is_running(view):
            return RUNNING
        store = view.store
    elif outcome is not None:
        store = outcome.task.idempotency_configuration.executor.store
    else:
        return ABSENT
    owners = [task for task in tasks if task.idempotency_configuration.executor.store == store]
    sender = next((task for task in owners if task.name == key.task), None)
    configuration = (sender or owners[0]).idempotency_configuration
    record = view.record if view else None
    case = configuration.executor.forget(
        key,
        NO_RECORD if view is None else record or UNREADABLE,
        configuration.settings.transaction if sender else None,
        outcome.row.owner if outcome else "",
        step_rows_in={*app_tasks.databases(tasks), *databases},
    )
    if case != "ok":
        return case
    found = outcome.row if outcome and view is None else record
    state = "unreadable" if found is None else str(found.state)
    about = About(
        sender, key.task, found.task_id if found else "", key, record.label if record else ""
    )
    state += "" if view else ", in the database alone"
    report(table.FORGOTTEN, about, found, user=user, state=state)
    return FORGOTTEN


def _is_running(view: RecordView) -> bool:
    """Whether the lease is valid. Rereads it, as a heartbeat may have extended it."""
    if view.state != State.STARTED:
        return False
    current = read_view(view.store, view.key) or view
    return current.state == State.STARTED and not current.is_expired
