"""The methods of a task that its class may override: handlers and ``__call__``.

Celery's tracer calls handlers (``before_start``, ``on_success`` …) for every message. Here they run
only if the body runs. A duplicate that is replayed, rejected or put back skips them, so a
receipt that ``on_success`` sends is sent once.

A user's own ``__call__`` belongs to the body and runs inside the execution. It may catch any error
of the code that it calls. If it ran first, it would also catch the exceptions that put back, ignore
or reject a duplicate, and its value would become the duplicate's result. Therefore the
``__call__`` of such a class is replaced by one that goes through the flow first.

Inherited methods are looked up at each call, so that a test can replace them in the base class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

from celery import Task
from celery.app.task import Context


def wrap(task: type[Task], base: type[Task]) -> None:
    """Wraps the methods that `task` defines, or inherits from a class of the user."""
    for name in ("before_start", "on_success", "on_failure", "on_retry", "after_return"):
        handler = inspect.getattr_static(task, name)
        if handler is not vars(Task)[name] and not hasattr(handler, "idempotency_wrapped"):
            setattr(task, name, _wrap_handler(name, _finder(task, name)))
    own = inspect.getattr_static(task, "__call__")
    if own not in (vars(base)["__call__"], task._wrapped_call):  # noqa: SLF001
        _wrap_call(task, base, own)


def _finder(owner: type[Task], name: str) -> Callable[[Task], Callable[..., Any]]:
    """Returns a function that finds the user's method `name` of `owner`, for a task of that class.

    A method that `owner` itself defines is remembered, because the wrapper replaces it. An
    inherited one is found at each call.
    """
    own = vars(owner).get(name)
    if own is None:
        return lambda task: getattr(super(owner, task), name)
    return lambda task: own.__get__(task, type(task)) if hasattr(own, "__get__") else own


def _wrap_handler(name: str, find: Callable[[Task], Callable[..., Any]]) -> Callable[..., Any]:
    def wrapper(self: Task, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if name == "before_start":
            # The tracer calls it before the flow, when it is not known whether the body will run.
            # `TaskHost.run` calls it again, and then it runs.
            runs = request is None or request.called_directly or request._protected  # noqa: SLF001
            runs = runs or not self.idempotency_configuration.is_protected
        else:  # without a request, as in the worker's main process, it runs
            runs = not getattr(request, "idempotency_without_body", False)
        return find(self)(*args, **kwargs) if runs else None

    wrapper.idempotency_wrapped = True  # type: ignore[attr-defined]
    return wrapper


class OwnCall(NamedTuple):
    """A running ``__call__`` of a user's class, and the body that its ``super()`` call runs."""

    task: Task
    request: Context | None
    body: Callable[..., Any]


_running: ContextVar[OwnCall | None] = ContextVar("idempotent_own_call", default=None)


def _wrap_call(task: type[Task], base: type[Task], own: Callable[..., Any]) -> None:
    find = _finder(task, "__call__")

    @wraps(own)
    def call(self: Task, *args: Any, **kwargs: Any) -> Any:
        if current(self) is not None:  # as super().__call__ of a subclass
            return find(self)(*args, **kwargs)
        return base.__call__(self, *args, **kwargs)

    task._own_call, task._wrapped_call = staticmethod(find), call  # noqa: SLF001
    task.__call__ = call


def run(task: Task, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `body`, through the ``__call__`` of the task's class if it has its own."""
    if find := task._own_call:  # noqa: SLF001
        return run_as(OwnCall(task, task.request_stack.top, body), find(task), args, kwargs)
    return body(*args, **kwargs)


def current(task: Task) -> OwnCall | None:
    """Returns the running ``__call__`` of the class of `task`; None without one."""
    running = _running.get()
    if running is None or running.task is not task or running.request is not task.request_stack.top:
        return None
    return running


def run_as(
    running: OwnCall | None, work: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Calls `work` with `running` as the current call."""
    outer = _running.get()
    try:
        _running.set(running)
        return work(*args, **kwargs)
    finally:
        _running.set(outer)
