"""A task's handlers (``before_start``, ``on_success`` …) run once for a body that runs.

Celery's tracer calls them for every message. A duplicate that is answered, refused or put back has
run nothing, so nothing is to follow it: whoever mails a receipt in ``on_success`` mails one.
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
    """Wrap the handlers that `task` has of its own, wherever it has them from."""
    for name in ("before_start", *_AFTER_THE_BODY):
        handler = inspect.getattr_static(task, name)
        if handler is not vars(Task)[name] and not hasattr(handler, "idempotency_guards"):
            applies = _is_at_the_body if name == "before_start" else _has_run_its_body
            setattr(task, name, _wrapped(handler, applies))


def _wrapped(handler: Any, applies: Callable[[Context | None], bool]) -> Callable[..., Any]:
    def guarded(self: Task, *args: Any, **kwargs: Any) -> Any:
        if applies(self.request_stack.top):
            bound = handler.__get__(self, type(self)) if hasattr(handler, "__get__") else handler
            return bound(*args, **kwargs)
        return None

    guarded.idempotency_guards = handler  # type: ignore[attr-defined]
    return guarded


def _is_at_the_body(request: Context | None) -> bool:
    """Not yet, where the tracer calls: the gate is still to come, and calls once more."""
    return request is None or request.called_directly or bool(request._protected)  # noqa: SLF001


def _has_run_its_body(request: Context | None) -> bool:
    """Or there is no message here that would have one, as in the worker's main process."""
    return not getattr(request, "idempotency_without_body", False)
