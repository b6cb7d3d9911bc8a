"""The runtime of code that blocks: tasks, functions, consumers."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from celery_idempotent.executor.execution import Execution
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.runtime.run_flow import run_flow
from celery_idempotent.executor.soft_limit import BODY, FLOW, WAIT, Interrupted, innermost
from celery_idempotent.key.key import Key
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.store.commands import Command
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.scripts import Reply

T = TypeVar("T")


class BlockingRuntime:
    """Everything runs in the calling thread; one instance serves any number of flows."""

    execution = Execution

    def __init__(self, store: RecordStore) -> None:
        self.store = store
        self.execute = store.execute
        self.execute_all = store.execute_all
        self.start_renewal = heartbeat.start_renewal
        self.stop_renewal = heartbeat.stop_renewal

    async def execute_interruptible(self, command: Command) -> Reply:
        """The reply of the store, unless a soft time limit is reached first."""
        limit = innermost()
        try:
            if limit is not None:
                limit.begin(WAIT)
            return await self.store.execute(command)
        finally:
            if limit is not None:
                limit.phase = FLOW

    async def sleep(self, seconds: float) -> None:
        """Blocks the thread."""
        time.sleep(seconds)

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Blocks the thread, unless a soft time limit is reached first."""
        limit = innermost()
        try:
            if limit is not None:
                limit.begin(WAIT)
            await self.store.wait_for_change(key, seen, seconds)
        finally:
            if limit is not None:
                limit.phase = FLOW

    async def run(self, func: Callable[[], T]) -> Outcome:
        """How `func` ends."""
        limit = innermost()
        outcome: Outcome | None = None
        try:
            try:
                if limit is not None:
                    limit.begin(BODY)
                outcome = Result(func())
            except Interrupted:
                raise
            except BaseException as error:
                outcome = Failure(error)
            if limit is not None:
                limit.phase = FLOW
        except Interrupted:
            raise
        except BaseException as late:
            # Raised by a signal handler after the body had ended.
            if limit is not None:
                limit.phase = FLOW
            outcome = outcome or Failure(late.__context__ or late)
        return outcome

    def drive_step(self, start: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """The outcome of the flow that `start` creates, a step of the current execution."""
        return run_flow(start)
