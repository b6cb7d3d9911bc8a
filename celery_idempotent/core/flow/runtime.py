"""The interface between the flow and the runtime that it uses.

The flow is a coroutine. On an event loop it is awaited. In a thread, every method of the runtime
blocks until it has finished, so that the flow is never suspended: `run_flow` calls it like a
function.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.outcome import Outcome
from celery_idempotent.core.key.key import Key
from celery_idempotent.core.lease.lease import Lease
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply

T = TypeVar("T")


class Runtime(Protocol):
    """Runs what one flow awaits."""

    @property
    def store(self) -> RecordStore:
        """The store of the records."""

    @property
    def execution(self) -> Callable[..., BaseExecution]:
        """Creates the execution that the body sees."""

    async def execute(self, command: Command) -> Reply:
        """Executes `command` in the store and returns the reply.

        Raises:
            StoreUnavailableError: if Redis is unavailable.
            CorruptRecordError: if the value under the key is not a string.
        """

    async def execute_interruptible(self, command: Command) -> Reply:
        """Executes a begin: a soft time limit ends the wait for the reply.

        Raises:
            SoftLimitReached: if the limit was reached.
        """

    async def sleep(self, seconds: float) -> None:
        """Waits."""

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Waits until the record differs from `seen`, for `seconds` at most.

        Raises:
            SoftLimitReached: if a soft time limit was reached.
        """

    async def run(self, func: Callable[[], Any]) -> Outcome:
        """Runs `func`, the user's code, and returns its outcome.

        Raises:
            SoftLimitReached: if a soft time limit was reached before it began.
        """

    def drive_step(self, start: Callable[[], Coroutine[Any, Any, Outcome]]) -> Any:
        """Runs the flow of a step, which `start` creates, and returns its outcome.

        On an event loop, it returns an awaitable of the outcome.
        """

    def start_renewal(self, lease: Lease) -> None:
        """Extends `lease` from now on."""

    def stop_renewal(self, lease: Lease) -> None:
        """Stops extending `lease`."""
