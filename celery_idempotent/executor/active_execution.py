"""An execution that has begun, with all that is needed to settle it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.events import table
from celery_idempotent.events.report import decide, report
from celery_idempotent.events.table import Event
from celery_idempotent.executor.call import ExecutorCall, Release
from celery_idempotent.executor.continuation import Continuation
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.steps import Steps
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record import layout
from celery_idempotent.record.layout import Begun
from celery_idempotent.record.payload import Payload
from celery_idempotent.sql.outcomes import Claim
from celery_idempotent.sql.transaction import Transaction
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.scripts import Reply

#: Frees the key at once and leaves nothing.
FREE = Release()
#: Seconds between two attempts to write while Redis is unavailable.
WRITE_RETRY_INTERVAL = 0.25


class ActiveExecution:
    """What a successful begin grants.

    Args:
        begun: the reply of the begin.
        sent_at: seconds of `lease.clock`, read before the begin was sent.
    """

    def __init__(
        self,
        call: ExecutorCall,
        begun: Begun,
        runtime: Runtime,
        codec: PayloadCodec,
        sent_at: float,
    ) -> None:
        self.call = call
        self.runtime = runtime
        self.codec = codec
        settings = call.settings
        extension = Extension(call.key, begun.token, settings.lease_ms, settings.result_ms)
        self.lease: Lease[Any] = Lease(runtime.store, extension, sent_at, self.report_lease_lost)
        #: The database transaction of the body, if it has one.
        self.transaction: Transaction | None = None
        #: What is being stored as the outcome, and in which field of the record.
        self.outcome: tuple[Payload, str] | None = None
        self.execution = runtime.execution(str(call.key), begun.token, begun.attempt, self)
        #: Runs the body.
        self.work = partial(call.run, self.execution)
        self._execution_id = begun.execution_id
        #: The record has the outcome, or is not held any more, or cannot be written.
        self.settled = False
        #: The process is about to end: write once, without waiting for Redis.
        self.exiting = False
        #: The heartbeat extends the lease.
        self.renewed = False
        self._loss_reported = False
        self._orphaned_seconds = begun.orphaned_seconds
        #: Whether there may be finished steps.
        self.has_steps = bool(begun.body)
        self._body = begun.body

    def start(self, *, announce: bool = True) -> None:
        """Starts to renew the lease, and sends the signals of a begin."""
        self.renewed = True
        self.runtime.start_renewal(self.lease)
        if not announce:
            return
        self.report(table.BEGUN)
        if self.execution.attempt > 1:
            self.report(table.TAKEN_OVER, orphaned_seconds=self._orphaned_seconds)

    def decide(self) -> None:
        """Counts the decision: the call runs."""
        decide(table.TAKEOVER if self.execution.attempt > 1 else table.RUN, self.call)

    def finish(self) -> None:
        """Stops renewing the lease. May be called again after a signal handler has raised in it."""
        if self.renewed:
            self.runtime.stop_renewal(self.lease)
            self.renewed = False

    def continue_call(self) -> None:
        """Begins to send what follows, since the outcome is stored."""
        if self.call.continues:
            self.call.continuation = Continuation(self.call, self.runtime, self._execution_id)
            self.call.continuation.start()

    @property
    def steps(self) -> Steps:
        """The steps that are finished."""
        self.has_steps = True
        # Atomic, since threads of the body can run their first steps at the same time.
        steps: Steps = vars(self).setdefault("_steps", Steps(self, self._body))
        return steps

    def step(self, name: str, func: Callable[[], Any], transaction: Any = None) -> Any:
        """The outcome of a step; on an event loop an awaitable of it."""
        return self.runtime.drive_step(partial(self.steps.run, name, func, transaction))

    def claim(self, step: str | None = None) -> Claim:
        """Claims the row of the key, or of a step, for this execution."""
        call, execution = self.call, self.execution
        prefix = self.runtime.store.config.prefix
        return Claim(
            call.key, prefix, call.task_id, call.worker, execution.token, execution.attempt, step
        )

    async def discard_outcome(self) -> None:
        """Deletes the offloaded value of an outcome that was refused."""
        if self.outcome is not None:
            payload, field = self.outcome
            await self.codec.delete_object(payload, self.execution.key, field)

    async def release(self, disposition: Release = FREE, error: Payload | None = None) -> Reply:
        """Gives the key back; `error` stays for copies of the message.

        Raises:
            StoreUnavailableError: if Redis is unavailable. The lease expires then.
        """
        self.roll_back()
        try:
            command = release_command(self.call, self.execution.token, disposition, error)
            reply = await self.runtime.execute(command)
        except IdempotencyError:
            self.settled = True
            raise
        self.settled = True
        return reply

    def roll_back(self, *, discard: bool = False) -> None:
        """Rolls back the transaction, if there is one that is not committed."""
        if self.transaction is not None:
            self.transaction.rollback(discard=discard)

    async def persist(self, command: Command) -> Reply:
        """Writes to the record; repeats while Redis is unavailable and `should_retry` allows it.

        Raises:
            StoreUnavailableError: if Redis stays unavailable.
        """
        since = monotonic()
        while True:
            try:
                return await self.runtime.execute(command)
            except StoreUnavailableError:
                if not self.should_retry(since):
                    raise
                await self.runtime.sleep(WRITE_RETRY_INTERVAL)
            except CorruptRecordError:
                # Another program has written to the key: the record does not exist any more.
                return Reply("lost", b"", 0)

    def should_retry(self, since: float) -> bool:
        """Whether to repeat a write that was first tried at `since` (seconds of `lease.clock`).

        For the length of a lease, even if this one has expired: while Redis is unavailable to all,
        no other execution can begin. If one has begun, Redis refuses the write. An outcome that is
        committed in a database can be stored by a later call.
        """
        if self.exiting or (self.transaction is not None and self.transaction.committed):
            return False
        return self.lease.trusted or monotonic() < since + self.lease.seconds

    def report_lease_lost(self, raw: bytes) -> None:
        """Logs, and sends the signal, once; only logs if no other execution has begun.

        Args:
            raw: the record that Redis has replied with.
        """
        if layout.is_abandoned(raw, self.execution.token, self.call.worker):
            self.lease.lost = True
            self.report(table.ENDED_BY_WORKER)
        elif not self._loss_reported:
            self._loss_reported = True
            self.lease.lost = True
            self.report(table.LEASE_LOST)

    def report(self, event: Event, **fields: Any) -> None:
        """Reports that `event` has happened to this execution."""
        report(event, self.call, self.execution, **fields)


def release_command(
    call: ExecutorCall, token: int, disposition: Release = FREE, error: Payload | None = None
) -> Command:
    """The command by which the execution of `call` under `token` gives its key back."""
    settings = call.settings
    return commands.release(
        call.key,
        token,
        hold_ms=round(disposition.hold * 1000),
        retention_ms=settings.result_ms,
        root=call.root,
        generation=call.generation if error else disposition.awaited,
        error=error,
        error_ms=settings.error_ms,
        sending_ms=call.sending_ms,
    )
