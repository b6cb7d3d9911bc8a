"""Reservations whose message has ended, or will never run, although the record does not have it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery.states import READY_STATES, REVOKED

from celery_idempotent.events.report import log_extra
from celery_idempotent.printable import one_line
from celery_idempotent.record.record import Record, State

if TYPE_CHECKING:
    from celery_idempotent.task.task import IdempotentTask

logger = logging.getLogger(__name__)


def is_stale(task: IdempotentTask, record: Record, *, for_retry: bool = False) -> bool:
    """Returns whether a key is reserved for a message that no worker will run.

    It was revoked; or, with ``on_store_error="run"``, it has run while Redis was unavailable.

    Args:
        for_retry: whether it is reserved for a retry, which is pending although Celery has stored
            the value of a body that called ``self.retry(throw=False)``.
    """
    if record.state is not State.RESERVED:
        return False
    try:
        state = task.AsyncResult(record.task_id).state
    except Exception as error:
        logger.debug(
            "Cannot read the state of task %s: %s",
            one_line(record.task_id),
            error,
            extra=log_extra(record.key, task_id=record.task_id),
        )
        return False
    if state == REVOKED:
        return True
    runs_without_store = task.idempotency_configuration.settings.on_store_error == "run"
    return runs_without_store and not for_retry and state in READY_STATES
