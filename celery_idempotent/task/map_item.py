"""Items of ``task.map``, ``task.starmap`` and ``task.chunks``; each is a call of its own.

Celery runs such a message as a built-in task, which calls the mapped task as a plain function for
each item. Of all plain calls, only these become executions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Task
from celery._state import _task_stack
from celery.app.task import Context

from celery_idempotent.configuration.app_tasks import MAP_TASKS
from celery_idempotent.flow.end import Requeue
from celery_idempotent.flow.execution import Execution
from celery_idempotent.task import overrides
from celery_idempotent.task.call import TaskCall


def next_item(task: Task, args: tuple[Any, ...]) -> tuple[Context, str] | None:
    """Returns the request of the current ``map`` message and the id of its next item.

    None if this call is not that item: Celery also calls errbacks and handlers as functions.
    """
    current = _task_stack.top
    if current is None or current.name not in MAP_TASKS:
        return None
    request: Context = current.request
    number = getattr(request, "idempotency_items", 0)
    mapped, items = _arguments(*request.args, **request.kwargs)
    try:
        if mapped != task.name or MAP_TASKS[current.name](items[number]) != args:
            return None
    except (IndexError, TypeError):  # no item is left, or it is not a tuple of arguments
        return None
    request.idempotency_items = number + 1
    return request, item_id(request.id, number + 1)


def _arguments(task: Mapping[str, Any] | str, it: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Returns the name of the mapped task, and the items; both may be passed by keyword."""
    return task if isinstance(task, str) else task["task"], it


def item_id(task_id: str, number: int) -> str:
    """Returns the id of an item of the message `task_id`; the number of the first item is 1."""
    return f"{task_id}/{number}"


class MapItemCall(TaskCall):
    """The call of one item, which can only be requeued with the whole message.

    The item's id is the message's id and the item's number, and is the same in every copy of the
    message. The result backend has no result under it, only the result of the whole message.
    """

    is_whole_message = False

    def run(self, execution: Execution) -> Any:
        """Runs the item under a request of its own, as Celery does for a plain call."""
        self.execution = execution
        _task_stack.push(self.sender)
        self.sender.push_request(args=self._args, kwargs=self._kwargs)
        self.sender.request.idempotency_call = self
        try:
            return overrides.run(self.sender, self.sender.run, self._args, self._kwargs)
        finally:
            self.sender.pop_request()
            _task_stack.pop()

    def requeue(self, end: Requeue) -> None:
        """Publishes the whole message again; its finished items will be replayed."""
        if self._request.is_eager:
            raise end.reason
        self.publish_again(_task_stack.top, end, self._request.headers)
