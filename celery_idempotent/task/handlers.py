"""Task handlers (``before_start``, ``on_success`` …) run only for a body that has run.

Celery's tracer calls them for every message. A duplicate that is replayed, rejected or requeued has
run nothing, so its handlers are skipped: a receipt that ``on_success`` sends is sent once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import Task

if TYPE_CHECKING:
    from celery.app.task import Context

_AFTER_THE_BODY = ("on_success", "on_failure", "on_retry", "after_return")


def wrap_handlers(task: type[Task]) -> None:
    """Wraps the handlers that `task` defines or inherits from a class other than Celery's."""
    for name in ("before_start", *_AFTER_THE_BODY):
        handler = inspect.getattr_static(task, name)
        if handler is not vars(Task)[name] and not hasattr(handler, "idempotency_wrapped"):
            condition = _is_at_body if name == "before_start" else _has_run_body
            setattr(task, name, _wrap(handler, condition))


def _wrap(handler: Any, condition: Callable[[Context | None], bool]) -> Callable[..., Any]:
    def wrapper(self: Task, *args: Any, **kwargs: Any) -> Any:
        if condition(self.request_stack.top):
            method = handler.__get__(self, type(self)) if hasattr(handler, "__get__") else handler
            return method(*args, **kwargs)
        return None

    wrapper.idempotency_wrapped = handler  # type: ignore[attr-defined]
    return wrapper


def _is_at_body(request: Context | None) -> bool:
    """Returns False for the tracer's call; the task calls ``before_start`` before its body."""
    return request is None or request.called_directly or bool(request._protected)  # noqa: SLF001


def _has_run_body(request: Context | None) -> bool:
    """Returns True also where there is no message, as in the worker's main process."""
    return not getattr(request, "idempotency_without_body", False)
