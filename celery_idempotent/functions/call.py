"""Calls that are no messages: whoever makes one waits for its outcome."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any, NoReturn
from uuid import uuid4

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.executor.call import Disposition, Fail, Release
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.settings import Settings
from celery_idempotent.task.call import worker_name

#: The execution under way, seen by the code that it runs.
current_execution: ContextVar[BaseExecution | None] = ContextVar(
    "idempotent_execution", default=None
)


class DirectCall:
    """One call at the gate. Where a message would come back later, the reason is raised."""

    unanswered_ids = b""
    requeue_count = 0
    generation = 0
    #: It belongs to whoever calls.
    soft_limit: SoftLimit | None = None
    rescheduled: Release | None = None
    stopped = False

    def __init__(self, sender: Any, key: Key, settings: Settings) -> None:
        self.sender = sender
        self.key = key
        self.settings = settings
        #: Nobody else has it: no other call is a copy of this one.
        self.task_id = str(uuid4())
        self.worker = worker_name(None, os.getpid())
        self.wait_timeout = settings.wait_timeout
        self.own_outcome = False

    def run(self, execution: Any) -> Any:
        """Only calls that bring their work do it in the gate."""
        raise NotImplementedError

    def disposition(self, error: BaseException) -> Disposition:
        """``replay_errors`` end the key; every other error gives it back."""
        return Fail() if isinstance(error, self.settings.replay_errors) else Release()

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Nobody else has the value."""
        raise error

    def replayed(self, record: Record) -> None:
        """Nothing follows a call."""

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """The caller decides whether to call again."""
        raise reason

    def ignore(self) -> NoReturn:
        """No policy of a call."""
        raise NotImplementedError

    def reject(self, reason: str) -> NoReturn:
        """No policy of a call."""
        raise NotImplementedError(reason)
