"""Tasks with handlers, given in every way that Celery knows."""

from __future__ import annotations

from typing import Any

from celery import Task, shared_task

from celery_idempotent import IdempotentTask
from tests.worker.ledger import Ledger
from tests.worker.shop import OutOfStockError


def _note(task: Any, name: str, task_id: str, args: Any, kwargs: Any) -> None:
    order = {**dict(zip(("order", "way"), args, strict=False)), **kwargs}["order"]
    Ledger.of(task.app).note(order, f"{name} of {task_id}")


class Handlers:
    """All of them, for a task of any kind."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Note it, with whether the gate is passed; some are refused here."""
        _note(self, "before_start", task_id, args, kwargs)
        if getattr(self, "idempotency", None) and not self.idempotency.protected:  # type: ignore[attr-defined]
            _note(self, "unprotected", task_id, args, kwargs)
        if "refused at the start" in args:
            raise OutOfStockError("refused", 0)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Note it."""
        _note(self, "on_success", task_id, args, kwargs)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Note it."""
        _note(self, "on_failure", task_id, args, kwargs)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Note it."""
        _note(self, "on_retry", task_id, args, kwargs)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Note it."""
        _note(self, "after_return", task_id, args, kwargs)


class TaskWithHandlers(IdempotentTask):
    """Some of its own, which call those of Celery's class."""

    abstract = True
    before_start = Handlers.before_start
    on_failure = Handlers.on_failure
    on_retry = Handlers.on_retry
    after_return = Handlers.after_return

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Note it."""
        super().on_success(retval, task_id, args, kwargs)
        _note(self, "on_success", task_id, args, kwargs)


class MixedTask(Handlers, IdempotentTask):
    """All of them from a class that knows nothing of Celery."""

    abstract = True


class PlainTask(Handlers, Task):
    """The same in plain Celery."""

    abstract = True


def _work(self: Any, order: str, way: str = "") -> str:
    ledger = Ledger.of(self.app)
    execution = getattr(self, "idempotency", None)
    ledger.note(order, f"body of {self.request.id}")
    if execution is not None:
        with ledger.run(order, self.request.id, execution):
            return _ways(self, order, way)
    return _ways(self, order, way)


def _ways(task: Any, order: str, way: str) -> str:
    if way == "fails" or (way == "fails for good"):
        raise OutOfStockError(order, 3)
    if way == "retries" and task.request.retries == 0:
        raise task.retry(countdown=1)
    if way == "hangs":
        Ledger.of(task.app).wait_for_release(f"never {order}")
    return order


OPTIONS: dict[str, Any] = {
    name: getattr(Handlers, name)
    for name in ("before_start", "on_success", "on_failure", "on_retry", "after_return")
}


def _task(name: str, base: Any, **options: Any) -> Any:
    return shared_task(_work, bind=True, base=base, name=f"shop.{name}", **options)


in_plain_celery = _task("in_plain_celery", PlainTask)
with_handlers = _task("with_handlers", TaskWithHandlers)
with_mixin = _task("with_mixin", MixedTask)
with_options = _task("with_options", IdempotentTask, **OPTIONS)
final = _task("final_with_handlers", MixedTask, idempotency_replay_errors=(OutOfStockError,))
refusing = _task("refusing", MixedTask, idempotency_on_conflict="raise")
switched_off = _task("switched_off", MixedTask, idempotency_enabled=False)
limited = _task("limited_with_handlers", MixedTask, time_limit=1.0)
