"""The interface between the executor and its callers: tasks, functions, consumers, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.settings import Settings
from celery_idempotent.store.commands import BackendResult

if TYPE_CHECKING:
    from celery_idempotent.executor.continuation import Continuation


@dataclass(frozen=True, slots=True)
class Release:
    """After the error the key is free, or reserved for a retry of the message."""

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


#: What an error of the body means for the key.
Disposition = Release | Fail | Delegate


class ExecutorCall(Protocol):
    """One call to execute at most once."""

    #: Sender of the signals: the task or function.
    sender: Any
    key: Key
    #: Shown beside the key; empty without ``idempotency_label``.
    label: str
    task_id: str
    #: ``nodename/pid`` of this process.
    worker: str
    settings: Settings
    #: Execution ids of earlier deliveries of this message whose begin had no reply.
    unanswered_ids: bytes
    #: How often this message has been requeued.
    requeue_count: int
    #: How many of these requeues followed a rollback by the database. The executor counts them.
    rollback_count: int
    #: Names the publish: copies and retries of its message have the same one.
    root: bytes
    #: Number of this message among those of its root; a retry has a higher one.
    generation: int
    #: Whether something follows the call.
    continues: bool
    #: Set by the executor: the right to send that; None if nothing follows, or it was sent.
    continuation: Continuation | None
    #: Set by the executor: what follows was sent before.
    continuation_sent: bool
    #: Whether the caller gets the value as duplicates do: serialized and restored.
    returns_restored: bool
    #: Set by the executor: the record's outcome belongs to this task id.
    own_outcome: bool
    #: Set by the executor: the result backend has the result of `backend_result` already.
    result_written: bool
    #: Set by the executor: what was decided about this pass, one of `signals.DECISIONS`; or empty.
    decision: str
    #: The soft time limit of this call alone; None if it covers more than this call.
    soft_limit: SoftLimit | None
    #: Set by the body: it has scheduled the call again, so its value is not the outcome.
    rescheduled: Release | None
    #: Set by the body: what it has raised to end its message, even if it has caught that.
    ending: BaseException | None

    @property
    def wait_ms(self) -> int:
        """How long the next turn is reserved for this message if it meets a run; 0: it is not."""

    @property
    def sending_ms(self) -> int | None:
        """How long sending that may take without a heartbeat, in milliseconds; None without it."""

    @property
    def wait_timeout(self) -> float:
        """Seconds to wait at most while another execution holds the key."""

    @property
    def required_generation(self) -> int:
        """What the row awaits at least once the task that this message replaces is committed.

        0 if it replaces none, or none with a transaction.
        """

    @property
    def dropped_continuation(self) -> bool:
        """Whether the body has removed the callbacks and the rest of the chain."""

    def run(self, execution: Any) -> Any:
        """Runs the body and returns its value. Its errors are raised as they are.

        Args:
            execution: an `Execution` or `AsyncExecution`, by the runtime.
        """

    def backend_result(self, value: Any) -> BackendResult | None:
        """What the result backend is to store for `value`; None if that is not for the executor."""

    def disposition(self, error: BaseException) -> Disposition:
        """What `error` of the body means for the key."""

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Returns the value that `record` does not hold, from elsewhere; or raises `error`."""

    def store_messages(self, functions: Sequence[Callable[[], Any]]) -> bytes:
        """The messages that `functions`, which the body has registered, publish: as JSON.

        Raises:
            TransactionError: if one of them does something else, or cannot be stored.
        """

    def publish_messages(self, messages: Any) -> None:
        """Publishes what `store_messages` returned, decoded.

        Raises:
            Exception: of the broker.
        """

    def replayed(self, record: Record) -> None:
        """Called when `record` answers this call."""

    def blocked(self, record: Record) -> None:
        """Called when `record` keeps this call from running, and does not answer it."""

    def is_stale(self, reservation: Reservation) -> bool:
        """Whether the message that has the reservation has ended."""

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """Publishes the message again, `seconds` from now; raises `reason` if there is none."""

    def ignore(self) -> NoReturn:
        """Acknowledges the message without an outcome."""

    def reject(self, reason: str) -> NoReturn:
        """Rejects the message, so that the broker dead-letters it."""
