"""The world of code that blocks: tasks, plain functions, consumers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from celery_idempotent.errors import IdempotencyError, LeaseLostError
from celery_idempotent.executor.execution import Execution
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.soft_limit import BODY, FLOW, WAIT, Interrupted, SoftLimit, current
from celery_idempotent.key.key import Key
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.lease.interrupt import Interrupt
from celery_idempotent.store.commands import Command
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.scripts import Reply

T = TypeVar("T")


class BlockingRuntime:
    """Everything happens in the thread that asks for it; one serves any number of flows."""

    execution = Execution

    def __init__(self, store: RecordStore) -> None:
        self.store = store
        self.start_renewal = heartbeat.start_renewal
        self.stop_renewal = heartbeat.stop_renewal

    async def execute(self, command: Command) -> Reply:
        """The store's answer."""
        return self.store.execute(command)

    async def ask(self, command: Command) -> Reply:
        """The store's answer, unless a soft time limit strikes first."""
        limit = current()
        if limit is None:
            return self.store.execute(command)
        try:
            limit.begin(WAIT)
            return self.store.execute(command)
        finally:
            limit.phase = FLOW

    async def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The store's answers."""
        return self.store.execute_all(many)

    async def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Block this thread meanwhile, unless a soft time limit strikes first."""
        limit = current()
        try:
            if limit is not None:
                limit.begin(WAIT)
            self.store.wait_for_change(key, seen, seconds)
        finally:
            if limit is not None:
                limit.phase = FLOW

    async def run(self, work: Callable[[], T], interrupt: Interrupt | None = None) -> Outcome:
        """How `work` ends."""
        limit = current()
        outcome: Outcome | None = None
        try:
            try:
                if limit is not None:
                    limit.begin(BODY)
                outcome = Result(work())
            except Interrupted:
                raise
            except BaseException as error:
                outcome = Failure(error)
            _over(limit, interrupt)
        except Interrupted:
            raise
        except BaseException as late:
            # It has struck, but the work had ended by itself.
            _over(limit, interrupt)
            outcome = outcome or Failure(late.__context__ or late)
        return outcome

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns."""
        return work()

    def interrupt(self) -> Interrupt:
        """Raises in this thread, or greenlet."""
        return Interrupt(LeaseLostError)


def _over(limit: SoftLimit | None, interrupt: Interrupt | None) -> None:
    if limit is not None:
        limit.phase = FLOW
    if interrupt is not None:
        interrupt.disarm()
