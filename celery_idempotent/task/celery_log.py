"""Celery's own lines about messages of idempotent tasks.

Celery logs a message that was requeued as "ignored", like one that is ignored, and a rejected one
with a traceback. The package logs what became of either, so Celery's line is left out.

An error that ends a message without its body (a refusal, the error that a duplicate is replayed) is
logged by Celery alone. Its line gets the attributes of this package's lines. The traceback shows
the flow and its cause, the same for each such call, and is logged once a minute.

A message that was requeued is received again and again, in an outage each half minute: only its
first "received" is logged.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

from celery import current_task

from celery_idempotent.events.repeats import Repeats, like_it
from celery_idempotent.events.report import log_extra

_tracebacks = Repeats()

#: Whether the message that is being received was requeued by this package.
comes_back: ContextVar[bool] = ContextVar("idempotent_comes_back", default=False)


def is_first(record: logging.LogRecord) -> bool:
    """Returns False for the line of a message that comes back."""
    return record.levelno > logging.INFO or not comes_back.get()


def edit(record: logging.LogRecord) -> bool:
    """Edits a line of Celery's tracer; returns False if it is left out."""
    data = getattr(record, "data", None)
    request = current_task.request_stack.top if current_task else None
    if not isinstance(data, dict) or request is None:
        return True
    if data.get("description") in ("ignored", "rejected"):
        return not getattr(request, "idempotency_end_logged", False)
    if record.exc_info and getattr(request, "idempotency_without_body", False):
        _shorten(record, getattr(request, "idempotency_call", None))
    return True


def _shorten(record: logging.LogRecord, call: object) -> None:
    assert record.exc_info
    kind = record.exc_info[0]
    number = _tracebacks.left_out((record.args.get("name"), kind))  # type: ignore[union-attr]
    if number is None:
        record.exc_info = None
        record.exc_text = None
    else:
        record.msg += like_it(number)
    if (active := getattr(call, "active", None)) is not None:
        vars(record).update(
            log_extra(
                active.key, task_id=active.task_id, label=active.label, decision=active.decision
            )
        )
