"""A call in the flow: its begin, its lease, and their end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow.call import Call, Host, Release
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.outcome import Outcome, restore_step
from celery_idempotent.core.flow.runtime import Runtime
from celery_idempotent.core.lease.clock import lease_now
from celery_idempotent.core.lease.lease import Lease
from celery_idempotent.core.payload.codec import PayloadCodec, not_stored
from celery_idempotent.core.record import layout
from celery_idempotent.core.record.layout import Begun
from celery_idempotent.core.record.payload import Payload
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command, LeaseExtension
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    ResultNotStoredError,
    StoreUnavailableError,
)

#: Seconds between two attempts to write while Redis is unavailable.
WRITE_RETRY_INTERVAL = 0.25
#: Loaded when a body reaches its first step.
_STEPS = "celery_idempotent.extensions.steps:Steps"
#: Frees the key at once and leaves nothing.
FREE = Release()


class ActiveCall:
    """One pass of a call through the flow.

    Args:
        data: the call, as the caller has handed it in.
        codec: blocking or asynchronous, like the runtime.
        extensions: create the extensions of the call, see :mod:`.extension`.
    """

    def __init__(
        self,
        data: Call,
        host: Host,
        runtime: Runtime,
        codec: PayloadCodec,
        extensions: Sequence[Callable[[ActiveCall], Any]] = (),
    ) -> None:
        self.data = data
        self.host = host
        self.runtime = runtime
        self.codec = codec
        self.sender = data.sender
        self.settings = data.settings
        self.task_id = data.task_id
        #: Without a fingerprint, and with an empty `label`, for a task that has replaced itself.
        self.key = data.key
        self.label = data.label
        #: The decision about this pass; set when it is reported.
        self.decision = ""
        self.execution_id = os.urandom(layout.ID_BYTES)
        #: A begin was sent, and its reply is not processed yet.
        self.unanswered = False
        #: The token of the last lease that had expired when its reply came.
        self.expired_token = 0
        #: Milliseconds to send the continuation; 0 without one.
        self.sending_ms = data.settings.lease_ms if data.continues else 0
        #: The fencing token; 0 without a record.
        self.token = 0
        #: None if nothing was granted, or there is no record.
        self.lease: Lease | None = None
        #: Passed to the body; set once the call may run.
        self.execution: BaseExecution | None = None
        #: The outcome is to be stored; else the body runs without protection.
        self.protected = False
        #: The payload of the outcome, and the field of the record that it is stored in.
        self.stored: tuple[Payload, str] | None = None
        #: Why the outcome is not stored.
        self.unsaved: StoreUnavailableError | None = None
        #: The record has the outcome, is no longer held, or cannot be written.
        self.settled = False
        #: A write is not repeated while Redis is unavailable: the process is about to end, or a
        #: later call can store the outcome.
        self.writes_once = False
        #: The finished steps, as in the record.
        self.steps_body = b""
        #: The right to send the continuation, once there is an outcome: a `Continuation`.
        self.continuation: Any = None
        #: Of a body that has run outside the flow.
        self.outcome: Outcome | None = None
        #: The lease is being renewed.
        self.renewed = False
        #: The flow has reached the body, which the caller runs: see `flow.execute_to_body`.
        self.at_body = False
        self._begun: Begun | None = None
        self._loss_reported = False
        self.extensions = [extension(self) for extension in extensions]

    async def send_begin(self) -> Reply:
        """Sends the begin; if it is granted, `lease` and `execution` are set."""
        settings = self.settings
        command, sent_at = begin_command(self), lease_now()
        self.unanswered = True
        try:
            reply = await self.runtime.execute_interruptible(command)
        except IdempotencyError:
            self.unanswered = False
            raise
        if reply.case == "begun":
            self._begun = begun = layout.begun(reply.raw)
            self.token, self.steps_body = begun.token, begun.body
            extension = LeaseExtension(self.key, begun.token, settings.lease_ms, settings.result_ms)
            lease = Lease(self.runtime.store, extension, sent_at, self.report_lease_lost)
            takes_over = begun.orphaned_seconds is not None
            self.execution = self.runtime.execution(
                str(self.key), begun.token, begun.attempt, self, _takes_over=takes_over
            )
            self.settled, self.protected, self.lease = False, True, lease
        self.unanswered = False
        outage = self.runtime.store.node_of(self.key).outage
        if outage.failed_calls:
            outage.end()
        if table.BEGIN_REPLIED.signal.receivers:
            seconds = lease_now() - sent_at
            report(table.BEGIN_REPLIED, self, case=reply.case, seconds=seconds)
        return reply

    @property
    def must_confirm(self) -> bool:
        """Whether the begin must be confirmed before the body.

        Only the death of a confirmed execution counts: of several in a row, at most the first may
        die uncounted.
        """
        assert self._begun is not None
        return self._begun.orphaned_seconds is not None or self.settings.max_attempts == 1

    async def confirm(self) -> bool:
        """Confirms that the granted execution runs; returns False if another has taken over.

        Raises:
            StoreUnavailableError: if Redis is unavailable.
        """
        assert self.lease is not None
        sent_at = lease_now()
        reply = await self.runtime.execute(commands.extend(self.lease.extension))
        if reply.case == "ok":
            self.lease.renewed(sent_at)
        return reply.case == "ok"

    def run_unprotected(self) -> BaseExecution:
        """Lets the body run without a record."""
        key = str(self.key)
        restore = partial(restore_step, self.settings, self.codec.values, key)
        self.execution = self.runtime.execution(key, _restore_step=restore)
        self.lease, self.token, self.protected, self.settled = None, 0, False, False
        return self.execution

    def start_renewal(self) -> None:
        """Renews the lease from now on, and reports the begin once."""
        assert self._begun is not None
        assert self.lease is not None
        self.renewed = True
        self.runtime.start_renewal(self.lease)
        if self.token != self.expired_token:
            report(table.BEGUN, self, self.execution)
            if (orphaned_seconds := self._begun.orphaned_seconds) is not None:
                self.report(table.TAKEN_OVER, orphaned_seconds=orphaned_seconds)

    def stop_renewal(self) -> None:
        """Stops the renewal. May be called again after a signal handler has raised in it."""
        if self.renewed and self.lease is not None:
            self.runtime.stop_renewal(self.lease)
            self.renewed = False

    def end_extensions(self) -> None:
        """Ends the extensions. May be called again."""
        for extension in self.extensions:
            extension.ended()

    async def give_back(self) -> None:
        """Releases the key if it is still held, after a signal handler has raised an error.

        The handler may have interrupted any line of the flow, so `lease` may not be set yet.
        """
        try:
            if self.unanswered:
                await self.send_begin()
            if self.lease is not None and not self.settled:
                self.stop_renewal()
                await self.release()
        except IdempotencyError as error:
            report(table.NOT_RELEASED, self, error=error)

    async def release(self, disposition: Release = FREE) -> Reply:
        """Gives the key back.

        Raises:
            IdempotencyError: if Redis is unavailable (the lease will expire) or the record corrupt.
        """
        reply = Reply("ok", b"", 0)
        try:
            if self.lease is not None:
                command = release_command(self, self.lease.token, disposition)
                reply = await self.runtime.execute(command)
        except IdempotencyError:
            self.settled = True
            raise
        self.settled = True
        return reply

    async def write(self, command: Command) -> Reply:
        """Writes to the record, if there is one; repeats while Redis is unavailable.

        It repeats for the length of a lease, even if this one has expired: while Redis is
        unavailable to all, no other execution can begin. If one has begun, Redis refuses the write.

        Raises:
            StoreUnavailableError: if Redis stays unavailable.
        """
        lease = self.lease
        if lease is None:
            return Reply("ok", b"", 0)
        since = lease_now()
        while True:
            try:
                return await self.runtime.execute(command)
            except StoreUnavailableError:
                expired = not lease.trusted and lease_now() >= since + lease.seconds
                if self.writes_once or expired:
                    raise
                await self.runtime.sleep(WRITE_RETRY_INTERVAL)
            except CorruptRecordError:
                # Another program has overwritten the record.
                return Reply("lost", b"", 0)

    async def discard_stored(self) -> None:
        """Deletes the offloaded value of an outcome that Redis has refused."""
        if self.stored is not None:
            payload, field = self.stored
            await self.codec.delete_object(payload, str(self.key), field)

    def not_stored(self) -> ResultNotStoredError | None:
        """Returns the error for duplicates if the record was completed without the value."""
        if self.stored is None or not self.settings.store_result:
            return None
        payload, field = self.stored
        return None if payload.format else not_stored(payload, str(self.key), field)

    @property
    def steps(self) -> Any:
        """The steps of the execution."""
        steps = vars(self).get("_steps")
        if steps is None:
            # Atomic, since threads of the body may reach their first steps at the same time.
            new = symbol_by_name(_STEPS)(self)
            steps = vars(self).setdefault("_steps", new)
            if steps is new:
                self.extensions.append(steps)
        return steps

    def step(self, name: str, func: Callable[[], Any], *, in_transaction: bool = False) -> Any:
        """Returns the outcome of a step; on an event loop, an awaitable of it."""
        step = partial(self.steps.run, name, func, in_transaction=in_transaction)
        return self.runtime.drive_step(step)

    def report_lease_lost(self, raw: bytes) -> None:
        """Reports the loss once; merely logs it if the worker has ended this execution.

        Args:
            raw: the record in the reply of Redis.
        """
        assert self.lease is not None
        if layout.is_abandoned(raw, self.lease.token, self.data.worker):
            self.lease.lost = True
            self.report(table.ENDED_BY_WORKER)
        elif not self._loss_reported:
            self._loss_reported = True
            self.lease.lost = True
            if raw:
                self.report(table.LEASE_LOST)
            else:
                self.report(table.RECORD_GONE, evictions=self.runtime.store.evictions())

    def report(self, event: Event, **fields: Any) -> None:
        """Reports that `event` has happened to the execution."""
        report(event, self, self.execution, **fields)


def begin_command(call: ActiveCall) -> Command:
    """Returns the command that begins an execution of `call`."""
    settings, data = call.settings, call.data
    return commands.begin(
        call.key,
        execution_id=call.execution_id,
        task_id=call.task_id,
        generation=data.generation,
        worker=data.worker,
        label=call.label,
        lease_ms=settings.lease_ms,
        retention_ms=settings.result_ms,
        hold_ms=data.hold_ms,
    )


def release_command(call: ActiveCall, token: int, disposition: Release = FREE) -> Command:
    """Returns the command that gives the key back, for the execution of `call` with `token`."""
    settings, key = call.settings, call.key
    # `abandon` compares no token: under an expired lease, another thread may run the message.
    if disposition.died and call.lease is not None and call.lease.trusted:
        about = key, call.data.task_id, call.data.worker
        return commands.abandon(*about, grace_ms=0, reason=layout.PROCESS_EXIT)
    if not disposition.hold:
        return commands.release(key, token, retention_ms=settings.result_ms)
    hold_ms = round(disposition.hold * 1000)
    return commands.reserve_retry(
        key,
        token,
        hold_ms=hold_ms,
        retention_ms=hold_ms + (settings.result_ms if call.steps_body else 0),
        generation=disposition.awaited,
    )
