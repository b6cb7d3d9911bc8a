"""Calls that are not messages: the caller waits for the outcome."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn
from uuid import uuid4

from celery import Celery

from celery_idempotent.errors import IdempotencyError, TransactionError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.executor.call import Disposition, Fail, Release
from celery_idempotent.executor.continuation import Continuation
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.functions.decision import NotCompletedError
from celery_idempotent.key.key import Key, default_root
from celery_idempotent.record.record import Record
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.settings import Settings
from celery_idempotent.task import outbox
from celery_idempotent.task.call import worker_name

#: The execution whose function or block is running.
current_execution: ContextVar[BaseExecution | None] = ContextVar(
    "idempotent_execution", default=None
)


def run_as_current(execution: BaseExecution, work: Callable[[], Any]) -> Any:
    """Runs `work`; `execution` is the current one meanwhile."""
    previous = current_execution.set(execution)
    try:
        return work()
    finally:
        current_execution.reset(previous)


class DirectCall:
    """A call of a function or a code block.

    Where a message would be requeued, ignored or rejected, this call raises.

    Args:
        sender: the sender of the call's signals.
        work: runs the function; None for a block or a batch, whose caller runs the code.
        label: shown beside the key.
        app: of the messages that the body publishes on commit.
    """

    unanswered_ids = b""
    requeue_count = 0
    rollback_count = 0
    generation = 0
    continues = False
    sending_ms: int | None = None
    continuation: Continuation | None = None
    continuation_sent = False
    #: With ``until="finished"`` no call waits for the next turn.
    wait_ms = 0
    returns_restored = True
    #: None, because a soft time limit applies to the task that makes the call.
    soft_limit: SoftLimit | None = None
    rescheduled: Release | None = None
    ending: BaseException | None = None
    dropped_continuation = False
    required_generation = 0

    def __init__(
        self,
        sender: Any,
        key: Key,
        settings: Settings,
        work: Callable[[], Any] | None = None,
        label: str = "",
        app: Celery | None = None,
    ) -> None:
        self.sender = sender
        self.label = label
        self._app = app
        #: Unique, because no other call is a redelivery of this one.
        self.task_id = str(uuid4())
        self.root = default_root(self.task_id)
        self.key = key.of_message(self.task_id) if settings.runs_again else key
        self.settings = settings
        self.worker = worker_name(None, os.getpid())
        self.wait_timeout = settings.wait_timeout
        self.own_outcome = False
        self.result_written = False
        self.decision = ""
        self._work: Any = work

    def run(self, execution: BaseExecution) -> Any:
        """Runs the work; `execution` is the current one meanwhile."""
        return run_as_current(execution, self._work)

    def backend_result(self, value: Any) -> None:
        """Returns None: no result backend has the value of a direct call."""

    def disposition(self, error: BaseException) -> Disposition:
        """Returns Fail for errors in ``replay_errors``, and Release for all others."""
        replayed = isinstance(error, self.settings.replay_errors)
        return Fail() if replayed and not isinstance(error, NotCompletedError) else Release()

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Raises `error`: the record is the only source of the result."""
        raise error

    def store_messages(self, functions: Sequence[Callable[[], Any]]) -> bytes:
        """Returns the messages that `functions` publish on commit."""
        return outbox.store(str(self.key), self._app, functions)

    def publish_messages(self, messages: Any) -> None:
        """Publishes what :meth:`store_messages` returned."""
        if self._app is None:
            raise TransactionError(
                f"{self.key}: its row has messages that another process was to publish; pass the "
                "Celery app to Idempotency() instead of a URL"
            )
        outbox.publish(str(self.key), self._app, self.task_id, messages)

    def replayed(self, record: Record) -> None:
        """Does nothing: a direct call has no continuation."""

    def blocked(self, record: Record) -> None:
        """Does nothing: nobody searches for the id of a direct call."""

    def is_stale(self, reservation: Reservation) -> bool:
        """Returns False: a direct call knows nothing of messages."""
        return False

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """Raises `reason`: the caller decides whether to call again."""
        report(table.RAISES, self, reason=reason)
        raise reason

    def ignore(self) -> NoReturn:
        """Is never called: ``ignore`` is not a policy of direct calls."""
        raise NotImplementedError

    def reject(self, reason: str) -> NoReturn:
        """Is never called: ``reject`` is not a policy of direct calls."""
        raise NotImplementedError(reason)


class AsyncDirectCall(DirectCall):
    """A call of a coroutine function."""

    async def run(self, execution: BaseExecution) -> Any:
        """Awaits the work; `execution` is the current one meanwhile."""
        previous = current_execution.set(execution)
        try:
            return await self._work()
        finally:
            current_execution.reset(previous)
