"""Reservations whose message has ended without a begin, although the record does not have it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.states import READY_STATES, REVOKED

from celery_idempotent.events.report import log_extra
from celery_idempotent.printable import one_line
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.store import commands
from celery_idempotent.task.message_headers import MessageHeaders

if TYPE_CHECKING:
    from celery_idempotent.task.task import IdempotentTask

logger = logging.getLogger(__name__)


def is_stale(task: IdempotentTask, reservation: Reservation) -> bool:
    """Returns whether the result backend has the message of a reservation as ended.

    It was revoked, no worker could run it, or it ran while Redis was unavailable. A retry may be
    pending although Celery has stored an outcome, that of a body which called
    ``self.retry(throw=False)``: only a revoked one has ended.
    """
    try:
        state = task.AsyncResult(reservation.task_id).state
    except Exception as error:
        logger.debug(
            "Cannot read the state of task %s: %s",
            one_line(reservation.task_id),
            error,
            extra=log_extra(None, task_id=reservation.task_id),
        )
        return False
    return state == REVOKED or (state in READY_STATES and reservation.retry is None)


def end_of_unreadable(task: IdempotentTask, message: Any) -> None:
    """Ends the reservation of a message that Celery drops without a result: nobody can read it."""
    try:
        task_id = message.headers["id"]
        key = MessageHeaders.read(task.name, task_id, message.headers).key
        if key is None:
            return
        configuration = task.idempotency_configuration
        if configuration.settings.runs_again:
            key = key.of_message(task_id)
        configuration.execute(commands.reserve(key, task_id, hold_ms=0))
    except Exception as error:
        logger.warning(
            "Cannot end the reservation of a message of %s that cannot be read; it will expire: %s",
            task.name,
            error,
            extra=log_extra(None),
        )
