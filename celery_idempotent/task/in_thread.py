"""The execution under way, for code of its task that runs in another thread.

Celery's own request is of one thread. Where a thread, or a task of an event loop, takes the context
of the body along (``asyncio.to_thread``, anyio, ``contextvars.copy_context().run``), the call comes
with it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery import Task, current_task

from celery_idempotent.errors import IdempotencyError

if TYPE_CHECKING:
    from celery_idempotent.executor.executor import Executor
    from celery_idempotent.task.call import TaskCall

_here: ContextVar[TaskCall | None] = ContextVar("idempotent_call", default=None)
#: The calls of this process that are messages.
_calls: set[TaskCall] = set()


def enter(executor: Executor, call: TaskCall, *, eager: bool) -> Any:
    """What `gate` makes of `call`, which is known meanwhile."""
    around = _here.get()
    try:
        _here.set(call)
        if not eager:
            _calls.add(call)
        return executor.enter(call)
    finally:
        _calls.discard(call)
        _here.set(around)


def call_of(task: Task) -> TaskCall | None:
    """The call of `task` that this context comes from; None in a plain call.

    Raises:
        IdempotencyError: if executions of the task are under way, and this thread may belong to
            one of them or to none.
    """
    call = _here.get()
    if call is not None:
        return call if call.sender.name == task.name else None
    if not current_task and any(
        other.execution is not None and other.sender.name == task.name for other in tuple(_calls)
    ):
        raise IdempotencyError(
            f"self.idempotency of {task.name} is not known in this thread: take "
            "`execution = self.idempotency` in the task's body, and hand that to the thread"
        )
    return None
