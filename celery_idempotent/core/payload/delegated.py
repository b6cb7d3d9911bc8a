"""Reads the outcome of a key whose task has replaced itself by another (``Task.replace``).

The record then has only the id of the other task, whose result is in the result backend.
"""

from __future__ import annotations

import time
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.states import EXCEPTION_STATES, PENDING, READY_STATES

from celery_idempotent.core.payload.result_codec import is_storable
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import Record, layout
from celery_idempotent.errors import NotReadyError, ResultNotStoredError


def result_of(app: Celery | None, record: Record) -> Any:
    """Returns the result of the task that replaced the one of `record`. May block.

    Raises:
        CorruptRecordError: if the record does not name it.
        NotReadyError: if the task has not finished. Without an app, no task is replaced.
        ResultNotStoredError: if the backend cannot return the result, may have deleted it, or
            holds an error that would affect the worker, such as WorkerLostError.
        Exception: what the task raised.
    """
    try:
        task_id = layout.read_task_id(record.body)
    except ValueError:
        raise layout.corrupt(record.key) from None
    if app is None:
        raise NotReadyError(task_id)
    result = app.AsyncResult(task_id)
    task = f"task {one_line(task_id)}"
    try:
        state, value = result.state, result.result
    except Exception as error:
        raise ResultNotStoredError(
            f"{task} replaced this one, and the result backend cannot return its result"
        ) from error
    expires = app.backend.expires
    if state == PENDING and expires and time.time() - record.at_ms / 1000 > expires:
        # The result has probably expired: waiting for it would never end.
        raise ResultNotStoredError(
            f"{task} replaced this one, and the result backend no longer has its "
            "result: set result_expires to at least idempotency_result_ttl"
        )
    if state not in READY_STATES:
        raise NotReadyError(task_id)
    if state in EXCEPTION_STATES:
        if not is_storable(type(value)) or isinstance(value, WorkerLostError):
            raise ResultNotStoredError(
                f"{task} replaced this one, and has failed with {type(value).__name__}, which "
                "is not raised again, because it would control the worker"
            )
        raise value
    return value
