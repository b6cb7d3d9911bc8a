"""Runs flows in a thread, for tasks, blocking functions and consumers.

The coroutines of a flow then block where they would suspend on an event loop (`functions.aio`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from celery_idempotent.core.flow.execution import Execution
from celery_idempotent.core.flow.soft_limit import SoftLimit, innermost
from celery_idempotent.core.flow.values import Failure, Outcome, Result
from celery_idempotent.core.lease.heartbeat import heartbeat
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.record_store import RecordStore

T = TypeVar("T")


class BlockingRuntime:
    """Runs everything in the calling thread; one instance serves any number of flows."""

    execution = Execution

    def __init__(self, store: RecordStore) -> None:
        self.store = store
        self.execute = store.execute
        self.execute_all, self.wait_for_change = store.execute_all, store.wait_for_change
        renewer = heartbeat.renewer(store)
        self.start_renewal, self.stop_renewal = renewer.start_renewal, renewer.stop_renewal

    async def sleep(self, seconds: float) -> None:
        """Blocks the thread."""
        time.sleep(seconds)

    async def run(self, func: Callable[[], T]) -> Outcome:
        """Returns the outcome of `func`, the only code in which a soft time limit is raised."""
        limit = innermost()
        outcome: Outcome | None = None
        try:
            try:
                limit.begin_body()
                outcome = Result(func())
            except BaseException as error:
                outcome = Failure(error)
            limit.in_body = False
        except BaseException as late:
            # A signal handler raised it after the body, so the outcome of the body counts.
            # If it interrupted the line that stores an error, that error is its context.
            limit.in_body = False
            outcome = outcome or Failure(late.__context__ or late)
        return outcome

    def drive_step(self, start: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """Runs the flow of a step, which `start` creates, and returns its outcome."""
        return run_flow(start)


def run_flow(start: Callable[[], Coroutine[Any, Any, T]], limit: SoftLimit | None = None) -> T:
    """Runs a flow, which must never be suspended, and returns its value.

    Args:
        start: creates the flow, once a soft time limit can no longer raise an error here.
        limit: of the message that the flow belongs to. An error that it still keeps at the end is
            dropped, since the message has ended. None: a soft time limit applies to an enclosing
            call, and its error is raised at the end.
    """
    own = SoftLimit() if limit is None else limit
    try:
        own.enter()
        return run_sync(start())
    finally:
        own.leave()
        if limit is None and (error := own.error) is not None:
            raise error


class Executor:
    """The resources that calls in the flow share; for code that blocks."""

    def __init__(self, store: RecordStore, codec: PayloadCodec) -> None:
        self.store = store
        self.codec = codec
        self.runtime = BlockingRuntime(store)
