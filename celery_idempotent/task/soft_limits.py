"""The soft time limit of a message, which is its alone from the start of its task to the end.

Celery's tracer works before the gate (it may write that the task has started) and behind it (it
writes the result): a limit that strikes there must not be the outcome either.
"""

from __future__ import annotations

from celery import current_task
from celery.app.task import Context

from celery_idempotent.executor import soft_limit
from celery_idempotent.executor.soft_limit import BODY, SoftLimit


def of(request: Context) -> SoftLimit:
    """The one of the message of `request`."""
    limit: SoftLimit = request.__dict__.setdefault("idempotency_soft_limit", SoftLimit())
    return limit


def let_through(request: Context) -> None:
    """The task runs ungated: raise a limit that has struck already, and let others pass."""
    limit = of(request)
    limit.phase = BODY
    if limit.error is not None:
        raise limit.error


def longest_wait(request: Context) -> float:
    """Seconds that a message may wait in its worker: half of its time limits, the rest to run."""
    task_limits = (current_task.time_limit, current_task.soft_time_limit) if current_task else ()
    limits = (*(request.timelimit or ()), *task_limits)
    return min((limit / 2 for limit in limits if limit), default=float("inf"))


def _of_message_under_way() -> SoftLimit | None:
    task = current_task
    if not task or not hasattr(task, "idempotency_enabled"):
        return None
    request = task.request_stack.top
    # What is eager is under the limit of the message whose task has called it.
    if request is None or request.called_directly or request.is_eager:
        return None
    return of(request)


soft_limit.of_message = _of_message_under_way
