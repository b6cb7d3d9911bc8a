"""The interface between the flow and its callers: tasks, functions, consumers, batches.

A caller hands in a `Call`, which is data, and a `Host`, which runs the body. The flow returns an
end (:mod:`.end`), and the caller carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from celery_idempotent.core.flow.outcome import Outcome
from celery_idempotent.core.flow.soft_limit import SoftLimit
from celery_idempotent.core.key.key import Key
from celery_idempotent.core.record.record import Record
from celery_idempotent.core.store.commands import BackendResult
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.settings import Settings


class Call(NamedTuple):
    """One call to execute at most once."""

    #: The task or function, which sends the signals.
    sender: Any
    key: Key
    settings: Settings
    task_id: str
    #: ``nodename/pid`` of this process.
    worker: str
    #: Maximum seconds to wait while another execution holds the key.
    wait_timeout: float
    #: Shown beside the key; empty without ``idempotency_label``.
    label: str = ""
    #: Number of this message among those of its task id; a retry has a higher one.
    generation: int = 0
    #: How often this message has been requeued.
    requeue_count: int = 0
    #: How many of these requeues followed a rollback by the database.
    rollback_count: int = 0
    #: Milliseconds for which the message keeps its reservation while it waits; 0 without one.
    hold_ms: int = 0
    #: Whether something follows the call: callbacks, the rest of a chain.
    continues: bool = False
    #: Of the message; None if soft time limits apply to a call around this one.
    soft_limit: SoftLimit | None = None


@dataclass(frozen=True, slots=True)
class Complete:
    """The value is the outcome of the key."""

    #: False if the body has removed the continuation of the call.
    continues: bool = True
    #: To be written together with the outcome, for the result backend.
    backend_result: BackendResult | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The key is free, or reserved for a retry of the message."""

    #: Seconds for which the key stays reserved; 0 frees it at once.
    hold: float = 0.0
    #: Generation of the message that the key is reserved for. A message with a lower one is a copy
    #: of an earlier message.
    awaited: int = 0
    #: Whether the execution counts as one that died, for ``max_attempts``.
    died: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The error is the outcome of the key; every duplicate gets it."""


@dataclass(frozen=True, slots=True)
class Delegate:
    """Another task has replaced this one under its id; the other's result is the outcome."""

    #: Generation of the first message that continues under the key with the task's id.
    awaited: int
    #: False if the other task ignores its result.
    stores_result: bool = True


#: What the end of a body means for the key.
Disposition = Complete | Release | Fail | Delegate


class Host(Protocol):
    """The caller of the flow."""

    @property
    def app(self) -> Any:
        """The Celery app that publishes messages; None if unknown."""

    @property
    def returns_restored(self) -> bool:
        """Whether the first caller also gets the value that the serializer restores."""

    def run(self, execution: Any) -> Any:
        """Runs the body and returns its value; raises the body's errors unchanged.

        Args:
            execution: an `Execution` or `AsyncExecution`, depending on the runtime.
        """

    def meaning(self, outcome: Outcome) -> tuple[Outcome, Disposition]:
        """Returns the outcome of the body, and the consequence for the key.

        A body may return or raise after it has published a retry or a replacement.
        """

    def difference(self, fingerprint: bytes) -> str:
        """Describes how the arguments differ from those of `fingerprint`; empty if unknown."""

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Returns or raises the outcome that `record` lacks, from elsewhere; or raises `error`."""
