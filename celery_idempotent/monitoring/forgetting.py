"""Forgets a record on a person's request: only if it is unchanged, and not running."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from celery_idempotent import call_log, signals
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.record.record import State
from celery_idempotent.store.commands import UNREADABLE
from celery_idempotent.store.inspection.record_query import RecordView, read_view

logger = logging.getLogger(__name__)

FORGOTTEN, RUNNING, CHANGED, ABSENT = "forgotten", "running", "changed", "absent"


def forget(
    view: RecordView, tasks: Sequence[IdempotentTaskLike], *, user: str, force: bool = False
) -> str:
    """Deletes the record if it is still as in `view`; logs it, and sends the signal ``forgotten``.

    Args:
        tasks: all idempotent tasks of the app.
        user: who requests it.
        force: also forget it while it is running. Its execution is not stopped.

    Returns:
        FORGOTTEN, RUNNING, CHANGED or ABSENT.

    Raises:
        StoreUnavailableError: if Redis is unavailable.
    """
    if not force and has_valid_lease(view):
        return RUNNING
    owners = [task for task in tasks if task.idempotency_configuration.executor.store == view.store]
    executor = owners[0].idempotency_configuration.executor
    record = view.record
    sender = next((task for task in owners if task.name == view.key.task), None)
    database = sender.idempotency_configuration.settings.transaction if sender else None
    case = executor.forget(view.key, UNREADABLE if record is None else record, database)
    if case != "ok":
        return {"changed": CHANGED, "absent": ABSENT}[case]
    task_id = "" if record is None else record.task_id
    state = "unreadable" if record is None else f"{record.state}, of task {task_id!r}"
    token = None if record is None else record.token
    label = "" if record is None else record.label
    extra = call_log.fields(str(view.key), task_id=task_id, label=label, token=token)
    logger.info("%r has forgotten the record %s (%s)", user, view.key, state, extra=extra)
    signals.send(
        signals.forgotten, sender, task_id=task_id, key=str(view.key), label=label, user=user
    )
    return FORGOTTEN


def has_valid_lease(view: RecordView) -> bool:
    """Whether the record is running. Reads it again: a heartbeat extends the lease meanwhile."""
    if not _is_started(view):
        return False
    current = read_view(view.store, view.key) or view
    deadline = None if current.record is None else current.record.deadline
    return _is_started(current) and deadline is not None and deadline > current.now


def _is_started(view: RecordView) -> bool:
    return view.record is not None and view.record.state is State.STARTED
