"""An execution under way, with all that is needed to settle it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idempotent import signals
from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.executor.call import Caller, Release
from celery_idempotent.executor.runtime.runtime import World
from celery_idempotent.executor.steps import Steps
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.payload.codec import RESULT, Payloads
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


class Running:
    """What one begin has granted.

    Args:
        begun: what it has granted.
        sent_at: seconds of `lease.clock`, taken before the begin was sent.
    """

    def __init__(
        self, call: Caller, begun: Begun, world: World, payloads: Payloads, sent_at: float
    ) -> None:
        self.call = call
        self.world = world
        self.payloads = payloads
        settings = call.settings
        extension = Extension(call.key, begun.token, settings.lease_ms, settings.result_ms)
        self.lease: Lease[Any] = Lease(world.store, extension, sent_at, self._lost)
        self.steps = Steps(self, begun.body)
        #: What is to be stored at the end, and as which part of the record.
        self.outcome: tuple[Payload, str] = Payload("", b""), RESULT
        self.execution = world.execution(
            str(call.key), begun.token, begun.attempt, self.lease, self.steps
        )
        #: The caller's.
        self.work = partial(call.run, self.execution)
        #: Under ``on_lease_lost="abort"``.
        self.interrupt = world.interrupt() if settings.on_lease_lost == "abort" else None
        #: The record has the outcome, or is no longer held, or cannot be written to.
        self.settled = False
        #: The process is to end: write once, and do not wait for Redis.
        self.in_haste = False
        self._loss_told = False
        self._idle = begun.idle

    def start(self) -> None:
        """Keep the lease alive from now on."""
        self.world.hold(self.lease)

    def announce(self) -> None:
        """Tell what begins, and over what."""
        self.send(signals.begun)
        if self.execution.recovered:
            logger.info(
                "%s: attempt %d takes over from an execution that died",
                self.execution.key,
                self.execution.attempt,
            )
            self.send(signals.taken_over, idle=self._idle)

    def over(self) -> None:
        """Nothing is left to protect."""
        self.world.let_go(self.lease)

    async def payload(self, value: Any, part: str = RESULT) -> Payload:
        """`value` as the settings want it kept, or the reason why it cannot be."""
        ours = self.execution
        write = self.payloads.of_result
        return await self._written(
            partial(write, value, self.call.settings, key=ours.key, token=ours.token, part=part)
        )

    async def error_payload(self, error: BaseException) -> Payload:
        """`error` as the settings want it kept, or the reason why it cannot be."""
        ours = self.execution
        write = self.payloads.of_error
        return await self._written(
            partial(write, error, self.call.settings, key=ours.key, token=ours.token)
        )

    async def _written(self, write: Callable[[], Payload]) -> Payload:
        return await self.world.apart(write) if self.payloads.offloads else write()

    async def discard_outcome(self) -> None:
        """It came too late: no record will ever point to it."""
        payload, part = self.outcome
        if payload.elsewhere:
            key = self.execution.key
            await self.world.apart(lambda: self.payloads.discard_payload(payload, key, part))

    async def release(self, verdict: Release = FREE, error: Payload | None = None) -> Reply:
        """Give the key back as `verdict` says; `error` is left for copies of the message."""
        try:
            answer = await self.world.execute(self.releasing(verdict, error))
        except IdempotencyError:
            self.settled = True  # its lease ends by itself
            raise
        self.settled = True
        return answer

    def releasing(self, verdict: Release = FREE, error: Payload | None = None) -> Command:
        """The command that gives the key back."""
        settings = self.call.settings
        return commands.release(
            self.call.key,
            self.execution.token,
            hold_ms=round(verdict.hold * 1000),
            retention_ms=settings.result_ms,
            generation=self.call.generation if error else verdict.awaited,
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
                return await self.world.execute(command)
            except StoreUnavailableError:
                if not self.outlasts(since):
                    raise
                await self.world.sleep(STORE_AGAIN)
            except CorruptRecordError:
                # Someone wrote something else under the key: the record is not there any more.
                return Reply("lost", b"", 0)

    def outlasts(self, since: float) -> bool:
        """Whether to go on trying to write what was first tried at `since` (monotonic seconds).

        For a lease's time even where ours has ended before: Redis may have been away from
        everybody, and then nobody has taken over. It knows, and refuses if somebody has.
        """
        if self.in_haste:
            return False
        return self.lease.trusted or monotonic() < since + self.lease.seconds

    def _lost(self) -> None:
        """The heartbeat has found another execution in the record, or none."""
        self.tell_loss()
        if self.interrupt is not None:
            self.interrupt.strike()

    def tell_loss(self) -> None:
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
