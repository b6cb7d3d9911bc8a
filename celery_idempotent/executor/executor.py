"""The flow of a call: begin, then run, replay or refuse, then settle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    StoreUnavailableError,
)
from celery_idempotent.events import table
from celery_idempotent.events.report import decide, decide_by, refuse, report
from celery_idempotent.executor import conflict, replacement, transaction
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.continuation import Continuation
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.outcome import Failure, Outcome, Result, is_asynchronous
from celery_idempotent.executor.replay import replay_or_refuse, write_result
from celery_idempotent.executor.returned import restore_step, without_record
from celery_idempotent.executor.runtime.blocking import BlockingRuntime
from celery_idempotent.executor.runtime.run_flow import run_flow
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.settle import settle
from celery_idempotent.executor.soft_limit import Interrupted
from celery_idempotent.executor.transaction import UnrecordedExecution
from celery_idempotent.key.key import Key
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record import layout, reservation
from celery_idempotent.record.record import Record
from celery_idempotent.sql.database import Database, forget_rows
from celery_idempotent.store import breaker, commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply

EXECUTION_ID_BYTES = layout.ID_BYTES
#: Begins without a reply that a message remembers.
MAX_UNANSWERED_IDS = 8

#: Seconds after which ``on_conflict="wait"`` sends another begin without an invalidation: when the
#: lease ends, within these limits.
MIN_WAIT_INTERVAL, MAX_WAIT_INTERVAL = 0.01, 1.0


async def execute(call: ExecutorCall, runtime: Runtime, codec: PayloadCodec) -> Outcome:
    """The outcome of `call`; raises as :meth:`Executor.enter`, except for errors of the body."""
    request = BeginRequest(call, runtime, codec)
    try:
        granted = await begin(request)
        if call.settings.transaction is not None and not isinstance(granted, (Result, Failure)):
            return await execute_in_transaction(request, granted)
        if isinstance(granted, ActiveExecution):
            outcome = await runtime.run(granted.work)
            return await settle(granted, outcome)
        if isinstance(granted, BaseExecution):
            outcome = await runtime.run(partial(call.run, granted))
            return without_record(call, outcome, codec)
        return granted
    except Interrupted as interrupted:
        request.unanswered = False  # a begin that Redis has granted is recognised by its id
        await request.give_back()
        decide_by(call, interrupted)
        conflict.requeue(call, request.unanswered_ids, interrupted.error)
    except GeneratorExit:
        raise  # the event loop is closed: nothing can be awaited
    except BaseException as error:
        decide_by(call, error)
        await request.give_back()
        raise
    finally:
        if request.active is not None and request.active.renewed:
            request.active.finish()


async def execute_in_transaction(
    request: BeginRequest, granted: ActiveExecution | BaseExecution
) -> Outcome:
    """As :func:`execute`, with the body in a transaction of ``idempotency_transaction``."""
    try:
        active = await begin_transaction(request, granted)
        if not isinstance(active, ActiveExecution):
            return active
        outcome = await active.runtime.run(active.work)
        if isinstance(outcome, Failure) and is_asynchronous(outcome.error):
            active.roll_back(discard=True)
        return await settle(active, outcome)
    finally:
        if request.active is not None:
            request.active.roll_back(discard=True)


async def begin_transaction(
    request: BeginRequest, granted: ActiveExecution | BaseExecution
) -> ActiveExecution | Outcome:
    """Begins the transaction of an execution; or returns the outcome that the database has."""
    if isinstance(granted, BaseExecution):
        granted = UnrecordedExecution(request.call, granted, request.runtime, request.codec)
    active = request.active = granted
    row = await transaction.claim(active)
    if row is not None:
        return await transaction.adopt(active, row)
    active.decide()
    return active


class Executor:
    """Executes calls once for each key; for code that blocks."""

    def __init__(self, store: RecordStore, codec: PayloadCodec) -> None:
        self.store = store
        self.codec = codec
        self.runtime = BlockingRuntime(store)

    def enter(self, call: ExecutorCall) -> Any:
        """The result of `call`, or of the execution that it duplicates.

        Raises:
            KeyReusedError: if the key has a record of other arguments.
            ConflictError: if another call holds the key, and the policy is ``raise``.
            CorruptRecordError: if the record cannot be read.
            StoreUnavailableError: if Redis is unavailable, and the policy is ``raise``.
            BaseException: whatever the body raises, or a stored error was.
        """
        outcome = run_flow(partial(execute, call, self.runtime, self.codec), call.soft_limit)
        if call.continuation is not None:
            call.continuation.follows_value = type(outcome) is Result
        return outcome.value if type(outcome) is Result else outcome.get()

    def forget(
        self,
        key: Key,
        shown: Record | str | None = None,
        database: Database | None = None,
        owner: str = "",
        step_rows_in: Iterable[Database] = (),
    ) -> str:
        """Deletes the record of `key`, its offloaded values, its row and those of its steps.

        The transaction that deletes the rows is committed when the record is deleted: if one of the
        two is unavailable, nothing is forgotten. A process that dies in between leaves the row,
        which duplicates get.

        Args:
            shown: as for :func:`commands.forget`.
            database: which has the row, if the task has a transaction.
            owner: as for :meth:`Database.forget`.
            step_rows_in: may have rows of steps, as may those that steps have used in this process.

        Returns:
            ``ok``, ``absent`` or ``changed``: a reply of lua/forget.lua.

        Raises:
            StoreUnavailableError: if Redis or the database is unavailable.
        """
        cases = []

        def forget_record() -> bool:
            cases.append(self._forget_record(key, shown))
            return cases != ["changed"]

        prefix = self.store.config.prefix
        had_rows = forget_rows(database, step_rows_in, prefix, key, owner, forget_record)
        if had_rows is None:
            return "changed"
        return "ok" if had_rows else cases[0]

    def _forget_record(self, key: Key, shown: Record | str | None) -> str:
        record = None
        if self.codec.offloads:
            with contextlib.suppress(CorruptRecordError):
                record = run_sync(self.store.get(key))
        case = run_sync(self.store.execute(commands.forget(key, shown))).case
        if record is not None and case == "ok":
            run_sync(self.codec.delete_record_objects(record))
        return case


class BeginRequest:
    """The begin of one call. What it was granted, or may have been, ends with the flow."""

    def __init__(self, call: ExecutorCall, runtime: Runtime, codec: PayloadCodec) -> None:
        self.call = call
        self.runtime = runtime
        self.codec = codec
        self.execution_id = os.urandom(EXECUTION_ID_BYTES)
        #: A begin was sent, and its reply has not been processed.
        self.unanswered = False
        self.active: ActiveExecution | None = None

    async def send(self) -> Reply:
        """Sends the begin; if it is granted, sets `active`."""
        sent_at = monotonic()
        self.unanswered = True
        try:
            reply = await self.runtime.execute_interruptible(
                begin_command(self.call, self.execution_id)
            )
        except IdempotencyError:
            self.unanswered = False
            raise
        if reply.case == "begun":
            begun = layout.begun(reply.raw)
            self.active = ActiveExecution(self.call, begun, self.runtime, self.codec, sent_at)
        self.unanswered = False
        outage = self.runtime.store.outage
        if outage.failed_calls:
            outage.end()
        if table.BEGIN_REPLIED.signal.receivers:
            seconds = monotonic() - sent_at
            report(table.BEGIN_REPLIED, self.call, case=reply.case, seconds=seconds)
        return reply

    @property
    def unanswered_ids(self) -> bytes:
        """The ids by which the next delivery of the message recognises begins without a reply."""
        return (self.call.unanswered_ids + self.execution_id)[
            -MAX_UNANSWERED_IDS * EXECUTION_ID_BYTES :
        ]

    def take_continuation(self, *, is_sent: bool) -> None:
        """Has the call send what follows it, once it has the outcome that Redis replied with."""
        call = self.call
        call.continuation_sent = is_sent
        if call.continues and not is_sent:
            # If the outcome is not available yet, the next delivery goes on with this one's right.
            call.unanswered_ids = self.unanswered_ids
            call.continuation = Continuation(call, self.runtime, self.execution_id)

    async def give_back(self) -> None:
        """Releases the key if it is still held, because a signal handler has raised.

        The handler can have interrupted any line of the flow, so `active` may not be set yet.
        """
        try:
            if self.unanswered:
                await self.send()
            active = self.active
            if active is not None and not active.settled:
                active.finish()
                await active.release()
        except IdempotencyError as error:
            report(table.NOT_RELEASED, self.call, error=error)


async def begin(request: BeginRequest) -> ActiveExecution | BaseExecution | Outcome:
    """What the call may do: run, run without protection, or return the stored outcome."""
    call, runtime = request.call, request.runtime
    if call.settings.transaction is not None and (generation := call.required_generation):
        await transaction.require_committed(request, generation)
    since = monotonic()
    announced_token, stale = 0, ""
    while True:
        try:
            reply = await request.send()
        except StoreUnavailableError as error:
            return without_store(call, runtime, request.codec, request.unanswered_ids, error)
        active = request.active
        if active is not None:
            active.start(announce=active.execution.token != announced_token)
            if active.execution.token == announced_token and not active.lease.trusted:
                await request.give_back()
                late = StoreUnavailableError("Redis replies later than idempotency_lease allows")
                return without_store(call, runtime, request.codec, request.unanswered_ids, late)
            if active.lease.trusted:
                if call.settings.transaction is None:  # else, when the row is claimed
                    active.decide()
                return active
            # The process was suspended. A begin with the same id returns the state of the key.
            active.report(table.BEGINS_AGAIN)
            announced_token, request.active = active.execution.token, None
            active.finish()
            continue
        record = _record_in(reply, call, runtime)
        reserved = reservation.read(record, reply.raw)
        if reserved and reserved.task_id != stale and call.is_stale(reserved):
            stale = reserved.task_id
            await _end_reservation(request, record, stale)
            continue
        if await _release_replaced(request, record, reply.raw):
            continue
        if reply.case in ("finished", "sent"):
            poisoned = call.settings.transaction is not None and layout.is_poisoned(record)
            if poisoned and await transaction.reopen(request, record):
                continue
            request.take_continuation(is_sent=reply.case == "sent")
            outcome = await replay_or_refuse(call, record, request.codec)
            await write_result(call, record, outcome, runtime.store)
            return outcome
        if reply.case == "reused":
            if call.generation and record.task_id == call.task_id:
                # A task that has replaced itself has other arguments under the same key.
                call.key, call.label = call.key.with_fingerprint(b""), ""
                continue
            call.blocked(record)
            raise refuse(call, conflict.reused(record))
        waits = call.settings.on_conflict == "wait"
        left = since + call.wait_timeout - monotonic() if waits else 0.0
        if left <= 0:
            conflict.refuse(call, record, returns=reply.case == "later")
        interval = min(left, _wait_interval(record, reply.now_ms))
        # The reply has the record of the key's turn, unless another delivery of this message runs.
        held = call.key if reply.case == "held" else call.key.turn
        await runtime.wait_for_change(held, reply.raw, interval)


async def _end_reservation(request: BeginRequest, record: Record, task_id: str) -> None:
    key = request.call.key
    if key.message:
        key = key.of_message(task_id)
    else:
        key = key.with_fingerprint(record.fingerprint)
    with contextlib.suppress(StoreUnavailableError):  # the next begin raises it, too
        await request.runtime.execute(commands.reserve(key, task_id, hold_ms=0))


async def _release_replaced(request: BeginRequest, record: Record, raw: bytes) -> bool:
    """Releases the key of another task whose replacement has failed; returns whether it has."""
    call = request.call
    if record.task_id == call.task_id:
        return False  # a copy of its message gets the error
    error = replacement.error_of(record, call.settings)
    if error is None:
        return False
    report(table.REPLACEMENT_FAILED, call, record=record, error=error)
    payload = await request.codec.encode_error(
        error, call.settings, key=str(call.key), token=record.token
    )
    with contextlib.suppress(StoreUnavailableError):  # the next begin raises it, too
        await request.runtime.execute(
            replacement.release(call.key, record, raw, call.settings, payload)
        )
    return True


def _record_in(reply: Reply, call: ExecutorCall, runtime: Runtime) -> Record:
    """The record in the reply to a begin that was not granted."""
    try:
        if reply.case == "corrupt":
            raise layout.corrupt(str(call.key))
        return runtime.store.record(call.key, reply.raw)
    except CorruptRecordError as error:
        refuse(call, error)
        raise


def _wait_interval(record: Record, now_ms: int) -> float:
    """Seconds until the next begin: a lease that expires causes no invalidation."""
    if record.deadline is None:
        return MAX_WAIT_INTERVAL
    left = record.deadline.timestamp() - now_ms / 1000
    return min(max(left, MIN_WAIT_INTERVAL), MAX_WAIT_INTERVAL)


def begin_command(call: ExecutorCall, execution_id: bytes) -> Command:
    """The command that begins an execution of `call`."""
    settings = call.settings
    return commands.begin(
        call.key,
        label=call.label,
        execution_id=execution_id,
        unanswered_ids=call.unanswered_ids,
        task_id=call.task_id,
        root=call.root,
        generation=call.generation,
        worker=call.worker,
        lease_ms=settings.lease_ms,
        retention_ms=settings.result_ms,
        max_attempts=settings.max_attempts,
        error_ms=settings.error_ms,
        continues=call.continues,
        wait_ms=call.wait_ms,
        keep_ms=settings.keep_ms,
    )


def without_store(
    call: ExecutorCall,
    runtime: Runtime,
    codec: PayloadCodec,
    unanswered_ids: bytes,
    error: StoreUnavailableError,
) -> BaseExecution:
    """An execution without protection under ``on_store_error="run"``; else requeue or raise."""
    policy = call.settings.on_store_error
    if runtime.store.outage.another_call():
        # An error for the first call of an outage only: one for each would hide all other lines.
        report(table.CANNOT_BEGIN, call, error=error)
    report(table.BEGIN_FAILED, call, error=error, policy=policy)
    if policy == "run":
        report(table.UNPROTECTED, call, error=error)
        key = str(call.key)
        return runtime.execution(
            key, _restore_step=partial(restore_step, call.settings, codec.values, key)
        )
    if policy == "raise":
        raise refuse(call, error)
    decide(table.STORE_UNAVAILABLE, call)
    delay = conflict.requeue_delay(call.requeue_count, breaker.MAX_DELAY)
    call.requeue(delay, unanswered_ids, error)
