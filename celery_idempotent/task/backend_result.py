"""Fused completion: one script stores the outcome of a task and its result in the result backend.

Celery's tracer calls ``task.backend.mark_as_done()`` with the value of the body, also if the result
is there already. Neither of the ways to keep it from writing once more that need no code here would
do: ``Ignore`` suppresses ``task_success``, and a request with ``ignore_result`` looks different to
handlers and signals. So the task's ``backend``, a public property, returns a stand-in once, whose
``mark_as_done()`` does nothing. If anything else reads the property before, the tracer gets the
real backend, which finds the result and leaves it as it is.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.app.task import Context
from celery.states import SUCCESS
from kombu.utils.encoding import bytes_to_str

from celery_idempotent.store.commands import BackendResult

if TYPE_CHECKING:
    from celery_idempotent.configuration.configuration import TaskConfiguration


class BackendResultTask(Task):
    """A task whose result may have been written before Celery's tracer does."""

    abstract = True

    #: Whether a subclass replaces `backend`, so that its result is written by Celery alone.
    _replaces_backend = False
    _configuration: TaskConfiguration | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Notes whether the class replaces `backend`."""
        super().on_bound(app)
        own = inspect.getattr_static(cls, "backend")
        cls._replaces_backend = own is not vars(BackendResultTask)["backend"]

    @property
    def backend(self) -> Any:
        """The task's result backend, as in Celery."""
        backend = super().backend
        call = getattr(self.request_stack.top, "idempotency_call", None)
        if call is not None and call.result_written:
            call.result_written = False
            return _WrittenBackend(backend)
        return backend

    @backend.setter
    def backend(self, backend: Any) -> None:
        Task.backend.fset(self, backend)
        type(self)._configuration = None  # noqa: SLF001 - it depends on the backend


class _WrittenBackend:
    """A result backend that has the result of the current task."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_done(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


def encode_result(
    backend: Any, value: Any, request: Context, max_size: int
) -> BackendResult | None:
    """Returns what `backend` stores for the `value` of a task, as its ``store_result()`` does.

    Returns:
        None if it cannot be encoded, which Celery will report, or takes more than `max_size` bytes.
    """
    try:
        meta = backend._get_result_meta(  # noqa: SLF001 - no public method returns it
            result=backend.encode_result(value, SUCCESS),
            state=SUCCESS,
            traceback=None,
            request=request,
        )
        meta["task_id"] = bytes_to_str(request.id)
        name, encoded = backend.get_key_for_task(request.id), backend.encode(meta)
    except Exception:
        return None
    return BackendResult(name, encoded, backend.expires or 0) if len(encoded) <= max_size else None
