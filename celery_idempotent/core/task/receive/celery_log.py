"""Filters of Celery's log lines about messages of idempotent tasks.

Celery logs a message that is put back as "ignored", like an ignored one, and a rejected one with a
traceback. The package logs how such a message ends, so Celery's line is suppressed.

Only Celery logs an error that ends a message before its body (a refusal, or the replayed error of
a duplicate). Its line gets the attributes of this package's lines. The traceback shows the flow and
the cause, which are the same for each such call, and is logged once a minute.

A message that is put back is received again and again, every half minute in an outage. Only its
first "received" is logged.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

from celery import current_task

from celery_idempotent.core.events.report import Repeats, like_it, log_extra

_tracebacks = Repeats()

#: Whether the message that Celery's handler is receiving was put back; `request` sets it.
comes_back: ContextVar[bool] = ContextVar("idempotent_comes_back", default=False)


def is_first(record: logging.LogRecord) -> bool:
    """Returns False for the line about a message that is put back."""
    return record.levelno > logging.INFO or not comes_back.get()


def edit(record: logging.LogRecord) -> bool:
    """Edits a line of Celery's tracer; returns False to suppress it."""
    data = getattr(record, "data", None)
    if not isinstance(data, dict):
        return True
    is_end = data.get("description") in ("ignored", "rejected")
    if not is_end and not record.exc_info:
        return True
    request = current_task.request_stack.top if current_task else None
    if is_end:
        return not getattr(request, "idempotency_end_logged", False)
    if getattr(request, "idempotency_without_body", False):
        _shorten(record)
        if (host := getattr(request, "idempotency_host", None)) is not None:
            call = host.call
            fields = {"task_id": call.task_id, "label": call.label, "decision": call.decision}
            vars(record).update(log_extra(call.key, **fields))
    return True


def _shorten(record: logging.LogRecord) -> None:
    assert record.exc_info
    kind = record.exc_info[0]
    number = _tracebacks.left_out((record.args.get("name"), kind))  # type: ignore[union-attr]
    if number is None:
        record.exc_info = None
        record.exc_text = None
    else:
        record.msg += like_it(number)
