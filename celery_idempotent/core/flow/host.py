"""The interface between the flow and its callers: tasks, functions, consumers, batches.

A caller hands in `CallData` and a `Host`, which runs the body; the flow makes a `Call` of them. It
returns an end (:mod:`.values`), and the caller carries it out.

The flow is a coroutine. On an event loop it is awaited. In a thread, every method of its `Runtime`
blocks until it has finished, so that the flow is never suspended: `run_flow` calls it like a
function.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.values import Outcome, Settlement
from celery_idempotent.core.key import Key
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.record import Record, Tail
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.settings import Settings


class CallData(NamedTuple):
    """What a caller hands in: one call to execute at most once."""

    #: The task or function, which sends the signals.
    sender: Any
    key: Key
    settings: Settings
    task_id: str
    #: ``nodename/pid`` of this process.
    worker: str
    #: Maximum seconds to wait in the caller while another execution holds the key; 0 for a message,
    #: which is put back instead.
    wait_timeout: float
    #: The part of the record that scripts only copy, such as the label.
    tail: Tail = Tail()
    #: Number of this message among those of its task id: a retry, or the message after
    #: ``Task.replace``, has a higher one (`continuation.generation_of`).
    generation: int = 0
    #: How often this message was put back, by its headers.
    put_back_count: int = 0
    #: How many of these put-backs followed a rollback by the database.
    rollback_count: int = 0
    #: Milliseconds for which the message keeps its reservation while it waits; 0 if publishing
    #: reserves no keys.
    hold_ms: int = 0
    #: Whether the call has a continuation: callbacks, the rest of a chain, a chord's count.
    continues: bool = False


class Host(Protocol):
    """The caller of the flow: runs the body, and decides what its end means for the key."""

    @property
    def app(self) -> Any:
        """The Celery app that publishes messages; None if unknown."""

    @property
    def returns_restored(self) -> bool:
        """Whether the first caller, like duplicates, gets the value that the serializer restores.

        Otherwise it gets the object that the body has returned.
        """

    def run(self, execution: Any) -> Any:
        """Runs the body and returns its value; raises the body's errors unchanged.

        Args:
            execution: an `Execution` or `AsyncExecution`, depending on the runtime.
        """

    def meaning(self, outcome: Outcome) -> Settlement:
        """Returns what the end of the body means for the key.

        It is not always that of the return or the error: the body may have published a retry or a
        replacement before.
        """

    def difference(self, fingerprint: bytes) -> str:
        """Describes how the arguments differ from those with `fingerprint`; empty if unknown."""

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Called if the value of a finished `record` cannot be read, with the reason as `error`.

        Returns or raises the outcome, if the host has it from elsewhere; else raises `error`.
        """


class Runtime(Protocol):
    """What a flow awaits: I/O, pauses and the body, in a thread or on an event loop."""

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

    async def sleep(self, seconds: float) -> None:
        """Waits."""

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Waits until the record differs from `seen`, for `seconds` at most."""

    async def run(self, func: Callable[[], Any]) -> Outcome:
        """Runs `func`, the user's code, and returns its outcome."""

    def drive_step(self, start: Callable[[], Coroutine[Any, Any, Outcome]]) -> Any:
        """Runs the flow of a step, which `start` creates, and returns its outcome.

        On an event loop, it returns an awaitable of the outcome.
        """

    def start_renewal(self, lease: Lease) -> None:
        """Extends `lease` from now on."""

    def stop_renewal(self, lease: Lease) -> None:
        """Stops extending `lease`."""
