"""Tasks whose handlers are defined in every way that Celery supports."""

from __future__ import annotations

from typing import Any

from celery import Task, shared_task
from celery.worker.request import Request

from celery_idempotent import IdempotentTask
from tests.worker.failing_tasks import OutOfStockError
from tests.worker.ledger import Ledger


def _note(task: Any, name: str, task_id: str, args: Any, kwargs: Any) -> None:
    order = {**dict(zip(("order", "way"), args, strict=False)), **kwargs}["order"]
    Ledger.of(task.app).note(order, f"{name} of {task_id}")


class Handlers:
    """Handlers that note their calls, for any task class."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Notes the call, and whether the execution is protected; may raise an error."""
        _note(self, "before_start", task_id, args, kwargs)
        if getattr(self, "idempotency", None) and not self.idempotency.protected:  # type: ignore[attr-defined]
            _note(self, "unprotected", task_id, args, kwargs)
        if "fails at the start" in args:
            raise OutOfStockError("at the start", 0)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Notes the call."""
        _note(self, "on_success", task_id, args, kwargs)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Notes the call."""
        _note(self, "on_failure", task_id, args, kwargs)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Notes the call."""
        _note(self, "on_retry", task_id, args, kwargs)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Notes the call."""
        _note(self, "after_return", task_id, args, kwargs)


class TaskWithHandlers(IdempotentTask):
    """Defines handlers, one of which calls that of Celery's class."""

    abstract = True
    before_start = Handlers.before_start
    on_failure = Handlers.on_failure
    on_retry = Handlers.on_retry
    after_return = Handlers.after_return

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Notes the call."""
        super().on_success(retval, task_id, args, kwargs)
        _note(self, "on_success", task_id, args, kwargs)


class MixedTask(Handlers, IdempotentTask):
    """Inherits its handlers from a class that is not a Celery task."""

    abstract = True


class PlainTask(Handlers, Task):
    """The same handlers with plain Celery."""

    abstract = True


def _work(self: Any, order: str, way: str = "") -> str:
    ledger = Ledger.of(self.app)
    execution = getattr(self, "idempotency", None)
    ledger.note(order, f"body of {self.request.id}")
    if execution is not None:
        with ledger.run(order, self.request.id, execution):
            return _end(self, order, way)
    return _end(self, order, way)


def _end(task: Any, order: str, way: str) -> str:
    if way == "fails":
        raise OutOfStockError(order, 3)
    if way == "retries" and task.request.retries == 0:
        raise task.retry(countdown=1)
    if way == "never returns":
        Ledger.of(task.app).wait_for_release(f"never {order}")
    return order


OPTIONS: dict[str, Any] = {
    name: getattr(Handlers, name)
    for name in ("before_start", "on_success", "on_failure", "on_retry", "after_return")
}


def _task(name: str, base: Any, **options: Any) -> Any:
    return shared_task(_work, bind=True, base=base, name=f"shop.{name}", **options)


class NotingRequest(Request):
    """A message in the worker's main process, which notes how its pool process ends."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes the call."""
        _note(self, "request failed", self.id, self.args, self.kwargs)
        return super().on_failure(exc_info, *args, **kwargs)


in_plain_celery = _task("in_plain_celery", PlainTask)
with_handlers = _task("with_handlers", TaskWithHandlers)
with_mixin = _task("with_mixin", MixedTask)
with_options = _task("with_options", IdempotentTask, **OPTIONS)
final = _task("final_with_handlers", MixedTask, idempotency_replay_errors=(OutOfStockError,))
refusing = _task("refusing", MixedTask, idempotency_on_conflict="raise")
switched_off = _task("switched_off", MixedTask, idempotency_enabled=False)
with_request = _task("with_request", IdempotentTask, Request=NotingRequest)
with_request_path = _task(
    "with_request_path", IdempotentTask, Request=f"{__name__}:{NotingRequest.__name__}"
)
limited = _task("limited_with_handlers", MixedTask, time_limit=1.0)
