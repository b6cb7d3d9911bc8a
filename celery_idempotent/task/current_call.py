"""The call that runs here.

Celery keeps the request of a task in its own thread. Code of the task that runs in another thread
finds its call in the context, if the thread has the context of the body (``asyncio.to_thread``,
anyio, ``contextvars.copy_context().run``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from celery import Task, current_task

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.extensions.transaction import run_plain as run_in_transaction
from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.execution import Execution, unprotected
from celery_idempotent.task.call import TaskCall

T = TypeVar("T")

_call_of_context: ContextVar[TaskCall | None] = ContextVar("idempotent_call", default=None)
_plain_execution: ContextVar[Execution | None] = ContextVar("idempotent_plain", default=None)
#: The calls of messages that this process runs.
_running: set[TaskCall] = set()


def run_in_executor(enter: Callable[[ActiveCall], T], call: TaskCall, *, eager: bool) -> T:
    """Runs `call` by `enter` of an executor, where `call_in_context` finds it."""
    outer_call = _call_of_context.get()
    try:
        _call_of_context.set(call)
        if not eager:
            _running.add(call)
        return enter(call.active)
    finally:
        _running.discard(call)
        _call_of_context.set(outer_call)


def run_plain(task: Task, work: Callable[[], Any]) -> Any:
    """Runs `work` without protection; with ``idempotency_transaction``, in a transaction.

    Inside a body with a transaction in that database, as a part of that.
    """
    settings = task.idempotency_configuration.settings
    if settings.transaction is None:
        return work()
    execution = unprotected()
    reset = _plain_execution.set(execution)
    try:
        return run_in_transaction(settings, execution, work)
    finally:
        _plain_execution.reset(reset)


def plain_execution() -> Execution:
    """Returns the execution of a call without protection."""
    return _plain_execution.get() or unprotected()


def call_in_context(task: Task) -> TaskCall | None:
    """Returns the call of `task` that this context belongs to, None for a plain call.

    Raises:
        IdempotencyError: if the task is running in this process, and this thread has no context:
            it may belong to any of the running calls, or to none.
    """
    call = _call_of_context.get()
    if call is not None:
        return call if call.sender.name == task.name else None
    if not current_task and any(
        other.execution is not None and other.sender.name == task.name for other in tuple(_running)
    ):
        raise IdempotencyError(
            f"self.idempotency of {task.name} is not available in this thread: take "
            "`execution = self.idempotency` in the task's body, and pass that to the thread"
        )
    return None
