"""A call in the flow: its begin, its lease, and their end.

Others read the attributes of a call, and change it by its methods.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import decide_by, report
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.host import CallData, Host, Runtime
from celery_idempotent.core.flow.values import Release, Settlement, restore_step
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.payload.codec import NOT_STORED, PayloadCodec, not_stored
from celery_idempotent.core.record import layout
from celery_idempotent.core.record.layout import Begun
from celery_idempotent.core.store import commands, run_sync
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


class Call:
    """One call, from its begin to its end.

    Args:
        data: what the caller has handed in.
        codec: blocking or asynchronous, like the runtime.
        extensions: create the extensions of the call, see :mod:`.extension`.
    """

    def __init__(
        self,
        data: CallData,
        host: Host,
        runtime: Runtime,
        codec: PayloadCodec,
        extensions: Sequence[Callable[[Call], Any]] = (),
    ) -> None:
        self.data = data
        self.host = host
        self.runtime = runtime
        self.codec = codec
        self.sender = data.sender
        self.settings = data.settings
        self.task_id = data.task_id
        #: Without a fingerprint and a label for a task that has replaced itself.
        self.key = data.key
        self.tail = data.tail
        #: The decision about this delivery; set when it is reported.
        self.decision = ""
        self.execution_id = os.urandom(layout.ID_BYTES)
        #: A begin was sent, and its reply is not processed yet.
        self._unanswered = False
        #: The token of the last lease that had expired when its reply came.
        self._expired_token = 0
        #: Which call it takes the key from, as in lua/begin.lua.
        self.replaces = 0
        #: The fencing token; 0 without a record.
        self.token = 0
        #: None if nothing was granted, or there is no record.
        self.lease: Lease | None = None
        #: Passed to the body; set once the call may run.
        self.execution: BaseExecution | None = None
        #: The outcome is to be stored; else the body runs without protection.
        self.protected = False
        #: How the execution has ended.
        self._settlement: Settlement | None = None
        #: Why the outcome is not stored.
        self.unsaved: StoreUnavailableError | None = None
        #: The record has the outcome, is no longer held, or cannot be written.
        self.settled = False
        self._writes_once = False
        #: The finished steps, as in the record.
        self.steps_body = b""
        #: Of the execution whose continuation this delivery sends; 0 if it sends none. It is
        #: callbacks, the rest of a chain, or a chord's count, which Celery's tracer sends after the
        #: flow. Until it is marked as sent, or its time is over, no redelivery sends it. If the
        #: process dies, its parent ends that time.
        self._continuation_token = 0
        self._is_renewed = False
        #: The flow has reached the body, which the caller runs: see `flow.execute_to_body`.
        self.at_body = False
        self._begun: Begun | None = None
        self._loss_reported = False
        self.extensions = [extension(self) for extension in extensions] if extensions else []

    async def send_begin(self) -> Reply:
        """Sends the begin; if it is granted, `lease` and `execution` are set."""
        settings = self.settings
        command, sent_at = begin_command(self), lease_now()
        self._unanswered = True
        try:
            reply = await self.runtime.execute(command)
        except IdempotencyError:
            self._unanswered = False
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
        self._unanswered = False
        outage = self.runtime.store.node_of(self.key).outage
        if outage.failed_calls:
            outage.end()
        if table.BEGIN_REPLIED.signal.receivers:
            seconds = lease_now() - sent_at
            report(table.BEGIN_REPLIED, self, case=reply.case, seconds=seconds)
        return reply

    def accept_other_arguments(self) -> None:
        """Continues without a fingerprint: the task has replaced itself, under the same key."""
        self.key = self.key.with_fingerprint(b"")
        self.tail = self.tail._replace(label="")

    @property
    def label(self) -> str:
        """Shown beside the key; may be empty."""
        return self.tail.label

    async def confirm(self) -> bool:
        """Confirms that the granted execution runs, where its death must count.

        Only the death of a confirmed execution counts: of several in a row, at most the first may
        die uncounted. Returns False if another has taken over.

        Raises:
            StoreUnavailableError: if Redis is unavailable.
        """
        assert self._begun is not None
        if self._begun.orphaned_seconds is None and self.settings.may_run(2):
            return True
        assert self.lease is not None
        sent_at = lease_now()
        reply = await self.runtime.execute(commands.extend(self.lease.extension))
        if reply.case == "ok":
            self.lease.renewed(sent_at)
        return reply.case == "ok"

    def drop_lease(self) -> None:
        """Forgets a lease that was granted, and that the call does not hold."""
        self.stop_renewal()
        self.lease = None

    def drop_expired_lease(self) -> bool:
        """Drops a lease that had expired when its reply came; returns whether it is the first."""
        assert self.lease is not None
        if self.token == self._expired_token:
            return False
        self.report(table.BEGINS_AGAIN)
        self.drop_lease()
        self._expired_token = self.token
        return True

    def protect_by(self, transaction: Any) -> None:
        """Lets `transaction`, which has the row of the key, keep the outcome."""
        assert self.execution is not None
        self.protected = True  # even without a record
        self.execution._transaction = transaction  # noqa: SLF001 - the body reads its connection

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
        self._is_renewed = True
        self.runtime.start_renewal(self.lease)
        if self.token != self._expired_token:
            report(table.BEGUN, self, self.execution)
            if (orphaned_seconds := self._begun.orphaned_seconds) is not None:
                self.report(table.TAKEN_OVER, orphaned_seconds=orphaned_seconds)

    def stop_renewal(self) -> None:
        """Stops the renewal. May be called again after a signal handler has raised in it."""
        if self._is_renewed and self.lease is not None:
            self.runtime.stop_renewal(self.lease)
            self._is_renewed = False

    def reach_body(self) -> None:
        """Leaves the flow to the caller, who runs the body."""
        self.at_body = True

    def leave_body(self) -> None:
        """Returns to the flow."""
        self.at_body = False

    def end_extensions(self) -> None:
        """Ends the extensions. May be called again."""
        for extension in self.extensions:
            extension.ended()

    def close(self) -> None:
        """Ends the extensions and the renewal, without awaiting anything."""
        self.at_body = False
        if self.extensions:
            self.end_extensions()
        if self._is_renewed:
            self.stop_renewal()

    async def interrupt(self, error: BaseException) -> None:
        """Gives back whatever the call was granted, after `error` has interrupted it."""
        self.leave_body()
        self.end_extensions()
        decide_by(self, error)
        await self.give_back()

    async def give_back(self) -> None:
        """Releases the key if it is still held.

        A signal handler may have interrupted any line of the flow, so `lease` may not be set yet.
        """
        try:
            if self._unanswered:
                await self.send_begin()
            if self.lease is not None and not self.settled:
                self.stop_renewal()
                await self.release()
        except IdempotencyError as error:
            report(table.NOT_RELEASED, self, error=error)

    async def release(self, settlement: Release = FREE) -> Reply:
        """Gives the key back.

        After an error of the body, it repeats as :meth:`write`: a key that stays held would count
        as a death.

        Raises:
            StoreUnavailableError: if Redis stays unavailable; the lease will expire.
        """
        self._writes_once |= not isinstance(settlement.error, Exception)
        try:
            reply = await self.write(release_command(self, self.token, settlement))
        except IdempotencyError:
            self.settled = True
            raise
        self.settled = True
        return reply

    def write_once(self) -> None:
        """Repeats no write while Redis is unavailable: a later call can store the outcome.

        Or the process is about to end.
        """
        self._writes_once = True

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
                if self._writes_once or lease_now() >= since + lease.seconds:
                    raise
                await self.runtime.sleep(WRITE_RETRY_INTERVAL)
            except CorruptRecordError:
                # Another program has overwritten the record.
                return Reply("lost", b"", 0)

    async def settle_as(self, settlement: Settlement, command: Command) -> Reply | None:
        """Ends the execution: stores the outcome by `command`.

        Returns:
            None if Redis stays unavailable, which is reported.
        """
        self._settlement = settlement
        reply = None
        if settlement.committed:
            self.write_once()
        try:
            reply = await self.write(command)
        except StoreUnavailableError as error:
            self.unsaved = None if settlement.committed else error
            event = table.COMMITTED_ONLY if settlement.committed else table.OUTCOME_UNSAVED
            self.report(event, error=error)
        self.mark_settled()
        return reply

    def mark_settled(self) -> None:
        """Ends the execution, whose outcome is stored, or is not to be stored."""
        self.settled = True
        if self._is_renewed:
            self.stop_renewal()

    async def discard(self, settlement: Settlement) -> None:
        """Deletes the offloaded value of an outcome that Redis has refused."""
        if settlement.payload is not None and settlement.field:
            await self.codec.delete_object(settlement.payload, str(self.key), settlement.field)

    def not_stored(self) -> ResultNotStoredError | None:
        """Returns the error for duplicates if the record was completed without the value."""
        settlement = self._settlement
        if settlement is None or not settlement.field:
            return None
        assert settlement.payload is not None
        if settlement.payload.format or settlement.payload.body == NOT_STORED:
            return None
        return not_stored(settlement.payload, str(self.key), settlement.field)

    def send_continuation_of(self, token: int) -> None:
        """Lets this delivery send the continuation of the execution with `token`, once."""
        self._continuation_token = token

    def mark_continuation_sent(self) -> None:
        """Marks in Redis that the continuation was sent; for code that blocks."""
        if not self._continuation_token:
            return
        command = commands.mark_sent(self.key, self._continuation_token)
        try:
            run_sync(self.runtime.execute(command))
        except IdempotencyError as error:
            report(table.MAY_CONTINUE_AGAIN, self, error=error)

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

    def add_step(self, entry: bytes) -> None:
        """Adds a finished step, which the record has."""
        self.steps_body += entry

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
            if raw[:1] in (b"D", b"X"):
                from celery_idempotent.core.record.newer import taken_over

                self.lease.error = taken_over(raw, str(self.key), self.key.task)
            if self.lease.error is not None:
                self.report(table.REPLACED, error=self.lease.error)
            elif raw:
                self.report(table.LEASE_LOST)
            else:
                from celery_idempotent.core.store.server_info import evictions

                self.report(table.RECORD_GONE, evictions=evictions(self.runtime.store))

    def report(self, event: Event, **fields: Any) -> None:
        """Reports that `event` has happened to the execution."""
        report(event, self, self.execution, **fields)


def begin_command(call: Call) -> Command:
    """Returns the command that begins an execution of `call`."""
    settings, data = call.settings, call.data
    return commands.begin(
        call.key,
        execution_id=call.execution_id,
        task_id=call.task_id,
        generation=data.generation,
        worker=data.worker,
        tail=call.tail,
        lease_ms=settings.lease_ms,
        retention_ms=settings.result_ms,
        hold_ms=data.hold_ms,
        replaces=call.replaces,
    )


def release_command(call: Call, token: int, settlement: Release = FREE) -> Command:
    """Returns the command that gives the key back, for the execution of `call` with `token`."""
    settings, key = call.settings, call.key
    # `abandon` compares no token: under an expired lease, another thread may run the message.
    if settlement.died and call.lease is not None and call.lease.trusted:
        about = key, call.data.task_id, call.data.worker
        return commands.abandon(*about, grace_ms=0, reason=layout.PROCESS_EXIT)
    if not settlement.hold:
        return commands.release(key, token, retention_ms=settings.result_ms)
    hold_ms = round(settlement.hold * 1000)
    return commands.reserve_retry(
        key,
        token,
        hold_ms=hold_ms,
        retention_ms=hold_ms + (settings.result_ms if call.steps_body else 0),
        generation=settlement.awaited,
    )
