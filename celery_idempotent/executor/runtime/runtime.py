"""Where the flow runs: in a thread that blocks, or on an event loop.

The flow is written once, as coroutines, and whatever takes time it asks its world for. On an event
loop that is awaited. A world that blocks has done it when it returns, so a flow in it runs from
its first line to its last without being suspended once: `run_sync` calls it like a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.outcome import Outcome
from celery_idempotent.key.key import Key
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store.base_record_store import BaseRecordStore
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

T = TypeVar("T")


class Interrupt(Protocol):
    """Stops work whose lease is lost."""

    def trigger(self) -> None:
        """Raise LeaseLostError in the work, unless it is over."""


class Runtime(Protocol):
    """What the flow asks for."""

    @property
    def store(self) -> BaseRecordStore:
        """Where the records are."""

    @property
    def execution(self) -> Callable[..., BaseExecution]:
        """Makes what the code that runs in this world sees of its execution."""

    async def execute(self, command: Command) -> Reply:
        """The store's answer.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
            CorruptRecordError: if there is no string under the key.
        """

    async def ask(self, command: Command) -> Reply:
        """As `execute`, for a begin: a soft time limit that strikes meanwhile ends the waiting.

        Raises:
            Interrupted: if one has struck.
        """

    async def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The answer to each of `many`, or the error that is its answer, in one round trip.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
        """

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Let time pass till the record is no longer what was `seen`, `seconds` at most.

        Raises:
            Interrupted: if a soft time limit strikes.
        """

    async def run(self, work: Callable[[], Any], interrupt: Any = None) -> Outcome:
        """How somebody else's code ends, which `interrupt` may stop.

        Raises:
            Interrupted: if a soft time limit has struck before it could begin.
        """

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, which blocks for long."""

    def interrupt(self) -> Interrupt:
        """Something that can stop the work which is to run here."""

    def start_renewal(self, lease: Lease[Any]) -> None:
        """Extend `lease` from now on."""

    def stop_renewal(self, lease: Lease[Any]) -> None:
        """Extend it no longer."""
