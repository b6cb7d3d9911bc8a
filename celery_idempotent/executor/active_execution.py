"""An execution under way, with all that is needed to settle it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent import signals
from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.executor.call import ExecutorCall, Release
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.steps import Steps
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.payload.codec import RESULT, PayloadCodec
from celery_idempotent.record.layout import Begun
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command, Extension
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

#: The key is free at once, and nothing is left.
FREE = Release()
#: Seconds between two tries to write while Redis is away.
STORE_AGAIN = 0.25


class ActiveExecution:
    """What one begin has granted.

    Args:
        begun: what it has granted.
        sent_at: seconds of `lease.clock`, taken before the begin was sent.
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
        self.lease: Lease[Any] = Lease(runtime.store, extension, sent_at, self._lost)
        self.steps = Steps(self, begun.body)
        #: What is to be stored at the end, and as which part of the record.
        self.outcome: tuple[Payload, str] = Payload("", b""), RESULT
        self.execution = runtime.execution(
            str(call.key), begun.token, begun.attempt, self.lease, self.steps
        )
        #: The caller's.
        self.work = partial(call.run, self.execution)
        #: Under ``on_lease_lost="abort"``.
        self.interrupt = runtime.interrupt() if settings.on_lease_lost == "abort" else None
        #: The record has the outcome, or is no longer held, or cannot be written to.
        self.settled = False
        #: The process is to end: write once, and do not wait for Redis.
        self.in_haste = False
        self._loss_told = False
        self._idle = begun.orphaned_seconds

    def start(self) -> None:
        """Keep the lease alive from now on."""
        self.runtime.start_renewal(self.lease)

    def announce(self) -> None:
        """Tell what begins, and over what."""
        self.send(signals.begun)
        if self.execution.recovered:
            logger.info(
                "%s: attempt %d takes over from an execution that died",
                self.execution.key,
                self.execution.attempt,
            )
            self.send(signals.taken_over, orphaned_seconds=self._idle)

    def finish(self) -> None:
        """Nothing is left to protect."""
        self.runtime.stop_renewal(self.lease)

    async def payload(self, value: Any, field: str = RESULT) -> Payload:
        """`value` as the settings want it kept, or the reason why it cannot be."""
        ours = self.execution
        write = self.codec.of_result
        return await self._written(
            partial(write, value, self.call.settings, key=ours.key, token=ours.token, field=field)
        )

    async def error_payload(self, error: BaseException) -> Payload:
        """`error` as the settings want it kept, or the reason why it cannot be."""
        ours = self.execution
        write = self.codec.of_error
        return await self._written(
            partial(write, error, self.call.settings, key=ours.key, token=ours.token)
        )

    async def _written(self, write: Callable[[], Payload]) -> Payload:
        return await self.runtime.run_in_thread(write) if self.codec.offloads else write()

    async def discard_outcome(self) -> None:
        """It came too late: no record will ever point to it."""
        payload, field = self.outcome
        if payload.is_offloaded:
            key = self.execution.key
            await self.runtime.run_in_thread(
                lambda: self.codec.discard_payload(payload, key, field)
            )

    async def release(self, disposition: Release = FREE, error: Payload | None = None) -> Reply:
        """Give the key back as `verdict` says; `error` is left for copies of the message."""
        try:
            answer = await self.runtime.execute(self.releasing(disposition, error))
        except IdempotencyError:
            self.settled = True  # its lease ends by itself
            raise
        self.settled = True
        return answer

    def releasing(self, disposition: Release = FREE, error: Payload | None = None) -> Command:
        """The command that gives the key back."""
        settings = self.call.settings
        return commands.release(
            self.call.key,
            self.execution.token,
            hold_ms=round(disposition.hold * 1000),
            retention_ms=settings.result_ms,
            generation=self.call.generation if error else disposition.awaited,
            error=error,
            error_ms=settings.error_ms,
        )

    async def persist(self, command: Command) -> Reply:
        """Write to the record; while Redis is away, again and again for as long as `outlasts` says.

        Raises:
            StoreUnavailableError: if Redis stays away.
        """
        since = monotonic()
        while True:
            try:
                return await self.runtime.execute(command)
            except StoreUnavailableError:
                if not self.should_retry(since):
                    raise
                await self.runtime.sleep(STORE_AGAIN)
            except CorruptRecordError:
                # Someone wrote something else under the key: the record is not there any more.
                return Reply("lost", b"", 0)

    def should_retry(self, since: float) -> bool:
        """Whether to go on trying to write what was first tried at `since` (monotonic seconds).

        For a lease's time even where ours has ended before: Redis may have been away from
        everybody, and then nobody has taken over. It knows, and refuses if somebody has.
        """
        if self.in_haste:
            return False
        return self.lease.trusted or monotonic() < since + self.lease.seconds

    def _lost(self) -> None:
        """The heartbeat has found another execution in the record, or none."""
        self.report_lease_lost()
        if self.interrupt is not None:
            self.interrupt.trigger()

    def report_lease_lost(self) -> None:
        """Tell, once, that someone else may be running."""
        if not self._loss_told:
            self._loss_told = True
            self.lease.lost = True
            logger.warning(
                "%s: task %s has lost its lease; its outcome will be refused",
                self.execution.key,
                self.call.task_id,
            )
            self.send(signals.lease_lost)

    def send(self, signal: Any, **details: Any) -> None:
        """Send `signal` with what every signal of an execution has."""
        if signals.heard(signal, self.call.sender):
            signal.send(
                sender=self.call.sender,
                task_id=self.call.task_id,
                key=self.execution.key,
                token=self.execution.token,
                attempt=self.execution.attempt,
                **details,
            )
