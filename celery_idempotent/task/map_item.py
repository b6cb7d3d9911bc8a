"""Items of ``task.map``, ``task.starmap`` and ``task.chunks``: each passes the gate by itself.

Celery runs such a message as a task of its own, which calls the mapped task once for each item as
a plain function. That one plain call is an execution; every other stays what it is.
"""

from __future__ import annotations

from typing import Any, NoReturn

from celery._state import _task_stack
from celery.app.task import Context

from celery_idempotent.configuration.app_tasks import MAPPING
from celery_idempotent.executor.execution import Execution
from celery_idempotent.record.record import Record
from celery_idempotent.task.call import TaskCall


def message_under_way() -> Context | None:
    """The request of the mapping message that is being worked on here, if one is."""
    task = _task_stack.top
    if task is None or task.name not in MAPPING:
        return None
    request: Context = task.request
    return request


def next_item_id(request: Context) -> str:
    """Returns the id of the next item of the message of `request`; called once for each item."""
    request.idempotency_items = getattr(request, "idempotency_items", 0) + 1
    return item_id(request.id, request.idempotency_items)


def item_id(task_id: str, number: int) -> str:
    """Returns the id of an item of the message `task_id`; the first item has the number 1."""
    return f"{task_id}/{number}"


class MapItemIgnoredError(Exception):
    """One item has no outcome; the others of the message go on."""


class MapItemCall(TaskCall):
    """One item: it goes back to the queue with the message.

    Its id is the message's and its place in it, which is the same in every copy of the message. The
    result backend has the message's result under the message's id, and none under this.
    """

    @property
    def soft_limit(self) -> None:
        """The limit is the whole message's, which has other items."""

    def run(self, execution: Execution) -> Any:
        """Run the item under a request of its own, as Celery does for a plain call."""
        self.execution = execution
        _task_stack.push(self.sender)
        self.sender.push_request(args=self._args, kwargs=self._kwargs)
        self.sender.request.idempotency_call = self
        try:
            return self.sender.run(*self._args, **self._kwargs)
        finally:
            self.sender.pop_request()
            _task_stack.pop()

    def replayed(self, record: Record) -> None:
        """What follows the message follows all its items; no single one decides on it."""

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """Put the whole message back; the items that are done will replay."""
        if self._request.is_eager:
            raise reason
        self.publish_again(_task_stack.top, seconds, self._request.headers, reason)

    def ignore(self) -> NoReturn:
        """Leave this item alone: the message has others, and Celery would ignore them all."""
        raise MapItemIgnoredError
