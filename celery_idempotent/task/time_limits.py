"""Time limits of the message that a process runs.

Celery's tracer also works before the executor (it may store the state STARTED) and after it (it
stores the result). A soft time limit that is raised there must not become the outcome, so a message
has one `SoftLimit` from the start of its task to the end.
"""

from __future__ import annotations

from celery import current_task
from celery.app.task import Context

from celery_idempotent.flow import soft_limit
from celery_idempotent.flow.soft_limit import BODY, SoftLimit


def soft_limit_of(request: Context) -> SoftLimit:
    """Returns the soft limit of the message of `request`."""
    limit: SoftLimit = request.__dict__.setdefault("idempotency_soft_limit", SoftLimit())
    return limit


def stop_deferring_soft_limit(request: Context) -> None:
    """Raises a soft limit that was deferred, and defers no other: the task runs unprotected."""
    limit = soft_limit_of(request)
    limit.phase = BODY
    if limit.error is not None:
        raise limit.error


def wait_within_time_limits(request: Context) -> float:
    """Returns half of the shortest time limit in seconds: the other half is left for the body."""
    task_limits = (current_task.time_limit, current_task.soft_time_limit) if current_task else ()
    limits = (*(request.timelimit or ()), *task_limits)
    return min((limit / 2 for limit in limits if limit), default=float("inf"))


def _soft_limit_of_current_message() -> SoftLimit | None:
    task = current_task
    if not task or not hasattr(task, "idempotency_enabled"):
        return None
    request = task.request_stack.top
    # An eager call is under the limit of the message whose task has made it.
    if request is None or request.called_directly or request.is_eager:
        return None
    return soft_limit_of(request)


soft_limit.of_message = _soft_limit_of_current_message
