"""Celery's log lines about messages that the executor has ended.

Celery logs a message that was requeued as "ignored", like one that is ignored, and a rejected one
with a traceback. The package logs what became of either, so Celery's line is left out.
"""

from __future__ import annotations

import logging

from celery._state import get_current_task
from celery.app.task import Context


def leave_out_end(request: Context) -> None:
    """Leaves out Celery's line about the end of the message of `request`."""
    request.idempotency_end_logged = True


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    data = getattr(record, "data", None)
    if not isinstance(data, dict) or data.get("description") not in ("ignored", "rejected"):
        return True
    task = get_current_task()
    request = task.request_stack.top if task is not None else None
    return not getattr(request, "idempotency_end_logged", False)


# The logger of the tracer, by its name in every version of Celery.
logging.getLogger("celery.app.trace").addFilter(_is_to_be_logged)
