"""The interface between the flow and what it runs on.

The flow is a coroutine. On an event loop it is awaited. In a thread every method of the runtime has
finished when it returns, so that the flow runs from its first line to its last without being
suspended: `run_flow` calls it like a function.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.flow.execution import BaseExecution
from celery_idempotent.flow.outcome import Outcome
from celery_idempotent.key.key import Key
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store.commands import Command
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.scripts import Reply

T = TypeVar("T")


class Runtime(Protocol):
    """What the flow uses."""

    @property
    def store(self) -> RecordStore:
        """The store of the records."""

    @property
    def execution(self) -> Callable[..., BaseExecution]:
        """Creates the execution that the body sees."""

    async def execute(self, command: Command) -> Reply:
        """The reply of the store.

        Raises:
            StoreUnavailableError: if Redis is unavailable.
            CorruptRecordError: if the key holds no string.
        """

    async def execute_interruptible(self, command: Command) -> Reply:
        """As `execute`, for a begin: a soft time limit ends the wait.

        Raises:
            Interrupted: if the limit was reached.
        """

    async def sleep(self, seconds: float) -> None:
        """Waits."""

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Waits until the record differs from `seen`, for `seconds` at most.

        Raises:
            Interrupted: if a soft time limit was reached.
        """

    async def run(self, func: Callable[[], Any]) -> Outcome:
        """How `func`, the user's code, ends.

        Raises:
            Interrupted: if a soft time limit was reached before it began.
        """

    def drive_step(self, start: Callable[[], Coroutine[Any, Any, Outcome]]) -> Any:
        """The outcome of the flow that `start` creates, a step of the current execution.

        On an event loop an awaitable of it.
        """

    def start_renewal(self, lease: Lease[Any]) -> None:
        """Extends `lease` from now on."""

    def stop_renewal(self, lease: Lease[Any]) -> None:
        """Stops extending it."""


class BatchRuntime(Runtime, Protocol):
    """What many flows in step use."""

    async def execute_all(self, commands: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The reply to each of `commands`, or its error, in one round trip.

        Raises:
            StoreUnavailableError: if Redis is unavailable.
        """
