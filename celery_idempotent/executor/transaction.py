"""Executions in a database transaction: ``idempotency_transaction``.

The row of the key is claimed before the body runs; its outcome is committed with the effects, then
stored in Redis. From the commit on, the row decides: whatever Redis holds, every caller gets it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    StoreUnavailableError,
)
from celery_idempotent.executor import conflict
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.decision import decide, log, refuse
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.outcome import Failure, Outcome
from celery_idempotent.executor.replay import replay_or_refuse
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.soft_limit import FLOW, WAIT, innermost
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record import layout
from celery_idempotent.record.layout import Begun
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.settings import Settings
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import Claim, Ended, Row
from celery_idempotent.sql.transaction import PlainTransaction
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

if TYPE_CHECKING:
    from celery_idempotent.executor.executor import BeginRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Messages that were requeued so often are not requeued again for an error of the database.
MAX_REQUEUES = 20


class UnrecordedExecution(ActiveExecution):
    """An execution without a record: Redis is unavailable, and the row alone protects it."""

    def __init__(
        self, call: ExecutorCall, execution: BaseExecution, runtime: Runtime, codec: PayloadCodec
    ) -> None:
        super().__init__(call, Begun(0, 1, b""), runtime, codec, monotonic())
        self.execution = execution
        self.work = partial(call.run, execution)
        self.interrupt = None

    async def release(self, *_: Any) -> Reply:
        """Rolls back; there is no key to release."""
        self.roll_back()
        self.settled = True
        return Reply("ok", b"", 0)

    async def persist(self, command: Command) -> Reply:
        """Does nothing: there is no record."""
        return Reply("ok", b"", 0)


def run_plain(
    settings: Settings,
    execution: BaseExecution,
    work: Callable[[], Any],
    outer: BaseExecution | None = None,
) -> Any:
    """Runs `work` without protection, in a transaction without an outcome if there is to be one.

    Args:
        outer: the execution whose body makes the call; it may have a transaction already.
    """
    if settings.transaction is None:
        return work()
    if outer is not None and outer._transaction is not None:  # noqa: SLF001
        execution._transaction = outer._transaction  # noqa: SLF001
        return work()
    with PlainTransaction(settings.transaction) as transaction:
        execution._transaction = transaction  # noqa: SLF001 - the body reads its connection
        return work()


async def claim(active: ActiveExecution) -> Row | None:
    """Begins the transaction and claims the row; None if the body is to run.

    Raises:
        Interrupted: if a soft time limit was reached while another transaction had the row.
        BaseException: what requeues the call, if the database is unavailable.
    """
    call, execution = active.call, active.execution
    database: Database = call.settings.transaction
    transaction = database.transaction(active.claim(), lambda row: _continues(row, call))
    active.transaction = transaction
    execution._transaction = transaction  # noqa: SLF001 - the body reads its connection
    try:
        return at_row(transaction.begin)
    except StoreUnavailableError as error:
        active.log(logging.ERROR, "cannot claim its row: %s", error)
        await _requeue(active, error)


def at_row(work: Callable[[], T]) -> T:
    """Calls `work`, which may wait for a transaction; a soft time limit interrupts it."""
    limit = innermost()
    if limit is None:
        return work()
    try:
        limit.begin(WAIT)
        return work()
    finally:
        limit.phase = FLOW


async def reopen(request: BeginRequest, poisoned: Record) -> bool:
    """Deletes the record of a key whose executions have died, if one of them has committed.

    The next begin is granted then, and returns the outcome of the row.

    Raises:
        Interrupted: if a soft time limit was reached while another transaction had the row.
        BaseException: what requeues the call, if the database or Redis is unavailable.
    """
    call = request.call
    try:
        row = _find(request)
        # A task that has replaced itself has not ended with its row.
        if row is None or row.expired or row.delegates:
            return False
        await request.runtime.execute(commands.forget(call.key, poisoned))
    except StoreUnavailableError as error:
        _requeue_undetermined(request, error)
    log(logger, logging.WARNING, call, "was committed by an execution that died")
    return True


async def require_committed(request: BeginRequest, generation: int) -> None:
    """Drops a message of a task that has replaced itself in a transaction that was rolled back.

    The replaced task runs again, and publishes another one. This one would run without its effects.

    Args:
        generation: `ExecutorCall.required_generation`.

    Raises:
        Interrupted: if a soft time limit was reached while another transaction had the row.
        BaseException: what drops the call, or requeues it if the database is unavailable.
    """
    call = request.call
    try:
        row = _find(request)
    except StoreUnavailableError as error:
        _requeue_undetermined(request, error)
    if row is not None and row.delegates:
        committed = _awaited(row, call) >= generation
    else:
        committed = row is not None and not row.expired
    if not committed:
        decide(call, "conflict")
        log(
            logger,
            logging.WARNING,
            call,
            "is dropped: the transaction of the task that it replaces was rolled back, or its key "
            "was forgotten",
        )
        call.ignore()


def _find(request: BeginRequest) -> Row | None:
    call, prefix = request.call, request.runtime.store.config.prefix
    database: Database = call.settings.transaction
    claim = Claim(call.key, prefix, call.task_id, call.worker, 0, 0)
    return at_row(database.transaction(claim, lambda row: False).find)


def _requeue_undetermined(request: BeginRequest, error: StoreUnavailableError) -> NoReturn:
    call = request.call
    log(logger, logging.ERROR, call, "cannot determine whether it was committed: %s", error)
    decide(call, "store_unavailable")
    conflict.requeue(call, request.unanswered_ids, error)


def _continues(row: Row, call: ExecutorCall) -> bool:
    """Whether `call` is a message of the task that has replaced itself, which goes on."""
    return 0 < _awaited(row, call) <= call.generation


def _awaited(row: Row, call: ExecutorCall) -> int:
    """The generation that continues the task of `call`; 0 if that has not replaced itself."""
    if not row.delegates or row.task_id != call.task_id:
        return 0
    return layout.read_awaited(row.body)


async def commit(active: ActiveExecution, command: Command) -> Outcome | None:
    """Commits the outcome that `command` stores in Redis.

    Returns:
        None if it is committed. The outcome of another execution, if that has committed first; the
        execution is settled then. Else the error for which nothing is committed.

    Raises:
        BaseException: what requeues the call, for a deadlock, a serialization failure or a lost
            connection.
    """
    transaction = active.transaction
    assert transaction is not None
    ended = outcome_of(command)
    try:
        row = None
        if ended.state is State.FAILED and not transaction.committed:
            transaction.rollback()  # the effects; the row of the error is claimed anew
            row = transaction.begin()
        if row is None:
            row = transaction.commit(ended)
    except Exception as error:
        transaction.rollback()
        if isinstance(error, StoreUnavailableError) or should_retry(active, error):
            await _requeue(active, error)
        return Failure(error)
    return None if row is None else await adopt(active, row)


def outcome_of(command: Command) -> Ended:
    """The outcome that `command` stores in Redis, for the row."""
    _, encoding, body, retention_ms, *_ = command.arguments
    state = State.FAILED if command.script.name == "fail" else State.COMPLETED
    return Ended(state, encoding, body, retention_ms)


def should_retry(active: ActiveExecution, error: BaseException | None) -> bool:
    """Whether the call is requeued for this error of the database, instead of failing."""
    return (
        active.transaction is not None
        and error is not None
        and active.call.requeue_count < MAX_REQUEUES
        and is_transient(error)
    )


async def retry(active: ActiveExecution, error: BaseException) -> NoReturn:
    """Requeues the call, whose transaction the database has rolled back."""
    active.log(logging.WARNING, "ran; its transaction was rolled back (%s)", type(error).__name__)
    await _requeue(active, error)


async def _requeue(active: ActiveExecution, error: BaseException) -> NoReturn:
    decide(active.call, "store_unavailable")
    await _release(active)
    conflict.requeue(active.call, active.call.unanswered_ids, error)


async def _release(active: ActiveExecution) -> None:
    active.finish()
    try:
        await active.release()
    except IdempotencyError as error:
        active.log(logging.WARNING, "cannot release its key, whose lease will expire: %s", error)


async def adopt(active: ActiveExecution, row: Row) -> Outcome:
    """The outcome of a row that another execution has committed. Stores it in Redis, too.

    Raises:
        KeyReusedError: if the row is of a call with other arguments.
    """
    return await replay_or_refuse(active.call, await adopt_record(active, row), active.codec)


async def adopt_record(active: ActiveExecution, row: Row) -> Record:
    """As :func:`adopt`; returns the record that has the outcome."""
    call, execution = active.call, active.execution
    record = row.record(call.key, active.codec.decode)
    fingerprint = call.key.fingerprint
    if fingerprint and record.fingerprint and record.fingerprint != fingerprint:
        active.finish()
        await active.release()
        raise refuse(call, conflict.reused(record))
    if row.delegates and row.task_id != call.task_id:
        # In a record of this task, the one that has replaced the other would not continue.
        await _release(active)
        return record
    store = commands.fail if record.state is State.FAILED else commands.complete
    payload = Payload(record.format, record.body)
    # The message that continues one which has replaced itself sends what follows.
    sending_ms = 0 if row.delegates else call.sending_ms
    command = store(call.key, execution.token, payload, row.remaining_ms, sending_ms=sending_ms)
    try:
        if (await active.persist(command)).case == "ok" and not row.delegates:
            active.continue_call()
    except (StoreUnavailableError, CorruptRecordError) as error:
        active.log(logging.WARNING, "cannot store in its record the outcome of its row: %s", error)
    active.settled = True
    active.finish()
    return record
