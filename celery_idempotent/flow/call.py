"""The interface between the flow and its callers: tasks, functions, consumers, batches.

A caller hands in a `Call`, which is data, and a `Host`, which runs the body. It gets an end
(:mod:`.end`), and does what that says after the flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.flow.outcome import Outcome
from celery_idempotent.flow.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.settings import Settings
from celery_idempotent.store.commands import BackendResult


class Call(NamedTuple):
    """One call to execute at most once."""

    #: Sender of the signals: the task or function.
    sender: Any
    key: Key
    settings: Settings
    task_id: str
    #: ``nodename/pid`` of this process.
    worker: str
    #: Names the publish: copies and retries of its message have the same one.
    root: bytes
    #: Seconds to wait at most while another execution holds the key.
    wait_timeout: float
    #: Shown beside the key; empty without ``idempotency_label``.
    label: str = ""
    #: Number of this message among those of its root; a retry has a higher one.
    generation: int = 0
    #: Execution ids of earlier deliveries of this message whose begin had no reply.
    unanswered_ids: bytes = b""
    #: How often this message has been requeued.
    requeue_count: int = 0
    #: How many of these requeues followed a rollback by the database.
    rollback_count: int = 0
    #: Whether something follows the call: callbacks, the rest of a chain.
    continues: bool = False
    #: Milliseconds to reserve the next turn for this message if it meets a run; 0: not.
    wait_ms: int = 0
    #: Of the message; None if a soft time limit belongs to a call around this one.
    soft_limit: SoftLimit | None = None


@dataclass(frozen=True, slots=True)
class Complete:
    """The value is the outcome of the key."""

    #: False if the body has removed what was to follow a value.
    continues: bool = True
    #: Is written together with the outcome, for the result backend.
    backend_result: BackendResult | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The key is free, or reserved for a retry of the message."""

    #: Seconds for which the key stays reserved; 0 frees it at once.
    hold: float = 0.0
    #: Generation of the message that the key is reserved for. A lower one is a copy of an earlier
    #: message.
    awaited: int = 0
    #: Whether the message has ended: copies of it get the error, and other calls may run.
    final: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The error is the outcome of the key: every duplicate gets it."""


@dataclass(frozen=True, slots=True)
class Delegate:
    """Another task has replaced this one under its id; its result is the outcome."""

    #: Generation of the first message that continues under the key, if it has the task's id.
    awaited: int
    #: False if the other task ignores its result.
    stores_result: bool = True


#: What the end of a body means for the key.
Disposition = Complete | Release | Fail | Delegate


class Host(Protocol):
    """What the flow asks its caller."""

    @property
    def returns_restored(self) -> bool:
        """Whether the first caller gets its value as the serializer restores it."""

    def run(self, execution: Any) -> Any:
        """Runs the body and returns its value. Its errors are raised as they are.

        Args:
            execution: an `Execution` or `AsyncExecution`, by the runtime.
        """

    def meaning(self, outcome: Outcome) -> tuple[Outcome, Disposition]:
        """Returns how the body has ended, and what that means for the key.

        A body can have published a retry or a replacement, and have returned or raised afterwards.
        """

    def difference(self, fingerprint: bytes) -> str:
        """Returns how the arguments differ from those of `fingerprint`; empty if not known."""

    def is_stale(self, reservation: Reservation) -> bool:
        """Whether the message that has the reservation has ended."""

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Returns the value that `record` does not hold, from elsewhere; or raises `error`."""
