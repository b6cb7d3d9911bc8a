"""A call in the flow, and its grant.

A :class:`Call` begins and ends. A :class:`Grant` is its right to run the body, and has whatever
exists only while the call has that right. Redis grants a lease of the key; a grant without a lease
lets the body run without a record.
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
from celery_idempotent.core.flow.host import CallData, Host, Runtime
from celery_idempotent.core.flow.values import Release, restore_step
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.record import layout
from celery_idempotent.core.record.layout import Begun
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command, LeaseExtension
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError

#: Seconds between two attempts to write while Redis is unavailable.
WRITE_RETRY_INTERVAL = 0.25
#: The class of `Grant.steps`, imported when a body reaches its first step.
_STEPS = "celery_idempotent.extensions.steps:Steps"
#: Frees the key at once and stores nothing.
FREE = Release()
#: In place of the reply to a begin, for a body that runs without a record.
_NO_RECORD = Begun(token=0, attempt=1, body=b"")


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
        #: Those of `data`, until :meth:`accept_other_arguments` or an extension changes them.
        self.key, self.tail = data.key, data.tail
        #: The decision about this delivery; `report` sets it. Empty before.
        self.decision = ""
        #: Redis gives each begin with this id the same grant.
        self.execution_id = os.urandom(layout.ID_BYTES)
        #: From which execution the begin takes the key: 0 for none, or one of `commands.REPLACES…`.
        #: The extensions `replace` and `newest` set it.
        self.replaces = 0
        #: Whether a begin was sent whose reply is not processed yet: it may have been granted.
        self._unanswered = False
        #: The right to run the body; None until the call has it.
        self.grant: Grant | None = None
        #: The token of the last grant whose lease had expired when its reply came; 0 if none had.
        self.expired_token = 0
        #: Whether the flow has reached the body, and is to go on when the caller has run it: see
        #: `flow.execute_to_body`.
        self.at_body = False
        #: The token of the execution whose continuation this delivery sends; 0 if it sends none.
        #: `core.task.message.continuation` reads it after Celery has sent the continuation.
        self.continuation_token = 0
        self.extensions = [extension(self) for extension in extensions] if extensions else []

    @property
    def label(self) -> str:
        """The readable name that is shown beside the key; empty without a template."""
        return self.tail.label

    def accept_other_arguments(self) -> None:
        """Removes the fingerprint and the label, which describe the arguments.

        A task may replace itself by a call of the same key with other arguments. The next begin of
        that call compares no arguments.
        """
        self.key = self.key.with_fingerprint(b"")
        self.tail = self.tail._replace(label="")

    async def send_begin(self) -> Reply:
        """Sends the begin, which may set `grant`; returns the reply."""
        command, sent_at = begin_command(self), lease_now()
        self._unanswered = True
        try:
            reply = await self.runtime.execute(command)
        except IdempotencyError:
            self._unanswered = False
            raise
        if reply.case == "begun":
            self.grant = Grant(self, layout.begun(reply.raw), sent_at)
        self._unanswered = False
        outage = self.runtime.store.node_of(self.key).outage
        if outage.failed_calls:
            outage.end()
        if table.BEGIN_REPLIED.signal.receivers:
            seconds = lease_now() - sent_at
            report(table.BEGIN_REPLIED, self, case=reply.case, seconds=seconds)
        return reply

    def run_unprotected(self) -> Grant:
        """Lets the body run without a record."""
        self.grant = Grant(self)
        return self.grant

    def end_extensions(self) -> None:
        """Ends the extensions. May be called again."""
        for extension in self.extensions:
            extension.ended()

    def close(self) -> None:
        """Ends the extensions and the renewal, without awaiting anything."""
        self.at_body = False
        if self.extensions:
            self.end_extensions()
        if self.grant is not None and not self.grant.settled:
            self.grant.stop_renewal()

    async def interrupt(self, error: BaseException) -> None:
        """Ends the call after `error` has interrupted the flow: gives back the key."""
        self.at_body = False
        self.end_extensions()
        decide_by(self, error)
        await self.give_back()

    async def give_back(self) -> None:
        """Releases the key if the call still has it.

        A signal handler may have interrupted the flow at any line. If the reply to a begin was not
        processed yet, the begin is sent again, and Redis replies with the same grant, if any.
        """
        try:
            if self._unanswered:
                await self.send_begin()
            if self.grant is not None and not self.grant.settled:
                await self.grant.release()
        except IdempotencyError as error:
            report(table.NOT_RELEASED, self, error=error)

    def report(self, event: Event, **fields: Any) -> None:
        """Reports that `event` has happened to the execution of the call."""
        report(event, self, self.grant and self.grant.execution, **fields)


class Grant:
    """The right of one call to run its body.

    Args:
        begun: the record that the begin has written; by default there is none.
        sent_at: seconds of `lease_now`, read before the begin was sent.
    """

    def __init__(self, call: Call, begun: Begun = _NO_RECORD, sent_at: float = 0.0) -> None:
        settings, runtime, key = call.settings, call.runtime, str(call.key)
        self.call = call
        #: The fencing token of the execution; 0 without a record.
        self.token = begun.token
        #: For a takeover: seconds since the end of the previous lease.
        self.orphaned_seconds = begun.orphaned_seconds
        #: The steps that this execution and earlier ones have finished, encoded as in the record.
        self.steps_body = begun.body
        #: The lease of the key; None without a record.
        self.lease: Lease | None = None
        if begun is _NO_RECORD:
            restore = partial(restore_step, settings, call.codec.values, key)
            #: What the body gets: ``self.idempotency`` of a task.
            self.execution = runtime.execution(key, _restore_step=restore)
        else:
            extension = LeaseExtension(call.key, self.token, settings.lease_ms, settings.result_ms)
            self.lease = Lease(runtime.store, extension, sent_at, self.report_lease_lost)
            takes_over = begun.orphaned_seconds is not None
            self.execution = runtime.execution(
                key, begun.token, begun.attempt, self, _takes_over=takes_over
            )
        #: Whether the outcome has to be stored: in the record, or in a row of the user's database,
        #: for which the extension `transaction` sets it.
        self.protected = self.lease is not None
        #: Whether nothing is left to write: the record has the outcome, is no longer held, or could
        #: not be written. The renewal has stopped before.
        self.settled = False
        #: Whether a write is not repeated while Redis is unavailable, because the process is about
        #: to end, or a later call can store the outcome.
        self.writes_once = False
        #: Whether the loss of the lease was reported: both the heartbeat and a write may find it.
        self._loss_reported = False

    async def confirm(self) -> bool:
        """Extends the lease before the body; returns False if another execution has taken over.

        Redis counts only the death of an execution that has extended its lease (lua/begin.lua).

        Raises:
            StoreUnavailableError: if Redis is unavailable.
        """
        assert self.lease is not None
        sent_at = lease_now()
        reply = await self.call.runtime.execute(commands.extend(self.lease.extension))
        if reply.case == "ok":
            self.lease.renewed(sent_at)
        return reply.case == "ok"

    def stop_renewal(self) -> None:
        """Stops extending the lease. May be called before the renewal starts, and again."""
        if self.lease is not None:
            self.call.runtime.stop_renewal(self.lease)

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
                return await self.call.runtime.execute(command)
            except StoreUnavailableError:
                if self.writes_once or lease_now() >= since + lease.seconds:
                    raise
                await self.call.runtime.sleep(WRITE_RETRY_INTERVAL)
            except CorruptRecordError:
                # Another program has overwritten the record.
                return Reply("lost", b"", 0)

    async def settle(self, command: Command) -> Reply:
        """Ends the execution by `command`, which stores its outcome or gives the key back.

        Raises:
            StoreUnavailableError: if Redis stays unavailable; the lease will expire.
        """
        try:
            reply = await self.write(command)
        except StoreUnavailableError:
            self.stop_renewal()
            self.settled = True
            raise
        self.stop_renewal()
        self.settled = True
        return reply

    async def release(self, settlement: Release = FREE) -> Reply:
        """Gives the key back.

        It repeats as :meth:`write` only after an error of the body: if that key stayed held until
        its lease expired, the execution would count as one that died.

        Raises:
            StoreUnavailableError: as :meth:`settle`.
        """
        # Stopped before the release: a renewal after it would be refused, and reported as a loss.
        self.stop_renewal()
        self.writes_once |= not isinstance(settlement.error, Exception)
        call, lease = self.call, self.lease
        # `abandon` finds the execution by worker and task id, not by token. After the lease,
        # another thread of this process may run the same message, and its lease would be ended.
        if settlement.died and lease is not None and lease.trusted:
            execution = call.key, call.task_id, call.data.worker
            return await self.settle(
                commands.abandon(*execution, grace_ms=0, reason=layout.PROCESS_EXIT)
            )
        kept_ms = call.settings.result_ms if self.steps_body else 0
        return await self.settle(release_command(call, self.token, settlement, kept_ms))

    @property
    def steps(self) -> Any:
        """The steps of the execution; the first use makes them an extension of the call."""
        steps = vars(self).get("_steps")
        if steps is None:
            # `setdefault` is atomic: of two threads of the body that reach their first steps at the
            # same time, one creates the object that both use.
            new = symbol_by_name(_STEPS)(self)
            steps = vars(self).setdefault("_steps", new)
            if steps is new:
                self.call.extensions.append(steps)
        return steps

    def step(self, name: str, func: Callable[[], Any], *, in_transaction: bool = False) -> Any:
        """Returns the outcome of a step; on an event loop, an awaitable of it."""
        step = partial(self.steps.run, name, func, in_transaction=in_transaction)
        return self.call.runtime.drive_step(step)

    def report_lease_lost(self, raw: bytes) -> None:
        """Reports that the lease is lost, once. Only logs it if the worker has ended the execution.

        Args:
            raw: the current record, from the reply of Redis; empty if it is gone.
        """
        call, lease = self.call, self.lease
        assert lease is not None
        if layout.is_abandoned(raw, self.token, call.data.worker):
            lease.lost = True
            call.report(table.ENDED_BY_WORKER)
        elif not self._loss_reported:
            self._loss_reported = True
            lease.lost = True
            if raw[:1] in (b"D", b"X"):  # the letters of a record that may name a newer call
                from celery_idempotent.core.record.newer import taken_over

                lease.error = taken_over(raw, str(call.key), call.key.task)
            if lease.error is not None:
                call.report(table.REPLACED, error=lease.error)
            elif raw:
                call.report(table.LEASE_LOST)
            else:
                from celery_idempotent.core.store.server_info import evictions

                call.report(table.RECORD_GONE, evictions=evictions(call.runtime.store))


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


def release_command(call: Call, token: int, settlement: Release, kept_ms: int = 0) -> Command:
    """Returns the command that gives the key back, for the execution of `call` with `token`.

    Args:
        kept_ms: milliseconds for which the record, with its steps, is kept after a reservation.
    """
    if not settlement.hold:
        return commands.release(call.key, token, retention_ms=call.settings.result_ms)
    hold_ms = round(settlement.hold * 1000)
    return commands.reserve_retry(
        call.key,
        token,
        hold_ms=hold_ms,
        retention_ms=hold_ms + kept_ms,
        generation=settlement.awaited,
    )
