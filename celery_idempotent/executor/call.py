"""What the gate asks of whoever stands before it. Each room of `entry/` answers in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.settings import Settings


@dataclass(frozen=True, slots=True)
class Release:
    """An error after which the key is free, or held for a retry of the same task id."""

    #: Seconds; 0 frees it at once.
    hold: float = 0.0
    #: Of the message that it is held for: one with a lower number is a copy of an earlier message.
    awaited: int = 0
    #: The message is done with: copies of it get the error, and everybody else may run.
    final: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """An error that ends the key: every duplicate gets it too."""


@dataclass(frozen=True, slots=True)
class Delegate:
    """Not an error at all: another task takes over this one's id, and its result is the result."""

    #: Of the first message that goes on under the key, if it bears the task's id.
    awaited: int
    #: False: that task is one which never tells its result.
    told: bool = True


Disposition = Release | Fail | Delegate


class ExecutorCall(Protocol):
    """One call at the gate."""

    #: Sender of the signals: the task.
    sender: Any
    key: Key
    task_id: str
    #: ``nodename/pid`` of this process.
    worker: str
    settings: Settings
    #: Ids of earlier passes of this message that had no answer from Redis.
    unanswered_ids: bytes
    #: How often this message has come back already.
    requeue_count: int
    #: Number of this message among those of its task id: a retry's is higher than the one before.
    generation: int
    #: Set by the gate: the record's outcome is this task id's own.
    own_outcome: bool
    #: Set by the work: it has scheduled itself again, so its value is not the outcome.
    rescheduled: Release | None

    @property
    def soft_limit(self) -> SoftLimit | None:
        """The soft time limit that is this call's alone; None if more than the call is under it."""

    @property
    def wait_timeout(self) -> float:
        """Seconds to wait for a key that is held, at most."""

    @property
    def stopped(self) -> bool:
        """Whether the work has called off what would have followed its result."""

    def run(self, execution: Any) -> Any:
        """Do the work. Whatever it raises comes out of the gate.

        Args:
            execution: of the kind that the world gives, in which this runs.
        """

    def disposition(self, error: BaseException) -> Disposition:
        """What an error of the work means for the key."""

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """The value that the record cannot give, from wherever the caller has it; or `error`."""

    def replayed(self, record: Record) -> None:
        """The record answers this call."""

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """Put the message back for later, then leave it; raise `reason` where there is none."""

    def ignore(self) -> NoReturn:
        """Leave the message, with no outcome of its own."""

    def reject(self, reason: str) -> NoReturn:
        """Hand the message to the broker's dead letters."""
