"""Executions in a database transaction: ``idempotency_transaction``.

The row of the key is claimed before the body runs; its outcome is committed with the effects, then
stored in Redis. From the commit on, the row decides: whatever Redis holds, every caller gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    StoreUnavailableError,
)
from celery_idempotent.events import table
from celery_idempotent.events.report import decide, refuse, report
from celery_idempotent.executor import conflict, replacement
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.outbox import begin_at_rows, commit_with_outbox, publish_found
from celery_idempotent.executor.outcome import Failure, Outcome
from celery_idempotent.executor.replay import replay_or_refuse
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.soft_limit import at_row
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
from celery_idempotent.sql.transaction import Transaction, only
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

if TYPE_CHECKING:
    from celery_idempotent.executor.executor import BeginRequest

#: A message that was requeued so often for such errors of the database ends with the next one.
MAX_ROLLBACKS = 20


class UnrecordedExecution(ActiveExecution):
    """An execution without a record: Redis is unavailable, and the row alone protects it."""

    def __init__(
        self, call: ExecutorCall, execution: BaseExecution, runtime: Runtime, codec: PayloadCodec
    ) -> None:
        super().__init__(call, Begun(0, 1, b""), runtime, codec, monotonic())
        self.execution = execution
        self.work = partial(call.run, execution)

    async def release(self, *_: Any) -> Reply:
        """Rolls back; there is no key to release."""
        self.roll_back()
        self.settled = True
        return Reply("ok", b"", 0)

    async def persist(self, command: Command) -> Reply:
        """Does nothing: there is no record."""
        return Reply("ok", b"", 0)


def run_plain(settings: Settings, execution: BaseExecution, work: Callable[[], Any]) -> Any:
    """Runs `work` without protection, in a transaction without an outcome if there is to be one."""
    if settings.transaction is None:
        return work()
    with settings.transaction.plain_transaction() as transaction:
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
    transaction = Transaction(
        database, lambda row: _continues(row, call) or _has_failed(row, active)
    )
    active.transaction = transaction
    execution._transaction = transaction  # noqa: SLF001 - the body reads its connection
    try:
        return only(await begin_at_rows([active], transaction, [active.claim()]))
    except StoreUnavailableError as error:
        active.report(table.ROW_UNAVAILABLE, error=error)
        await _requeue(active, error)


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
    report(table.ROW_FOUND, call)
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
        report(table.REPLACED_ROLLED_BACK, call)
        call.ignore()


def _find(request: BeginRequest) -> Row | None:
    call, prefix = request.call, request.runtime.store.config.prefix
    database: Database = call.settings.transaction
    claim = Claim(call.key, prefix, call.task_id, call.worker, 0, 0)
    return at_row(partial(Transaction(database).find, claim))


def _requeue_undetermined(request: BeginRequest, error: StoreUnavailableError) -> NoReturn:
    call = request.call
    report(table.ROW_UNKNOWN, call, error=error)
    decide(table.STORE_UNAVAILABLE, call)
    conflict.requeue(call, request.unanswered_ids, error)


def _continues(row: Row, call: ExecutorCall) -> bool:
    """Whether `call` is a message of the task that has replaced itself, which goes on."""
    return 0 < _awaited(row, call) <= call.generation


def _has_failed(row: Row, active: ActiveExecution) -> bool:
    """Whether the row is of another task that has replaced itself, and its replacement failed."""
    call = active.call
    if row.task_id == call.task_id:
        return False
    record = row.record(call.key, active.codec.decode)
    return replacement.error_of(record, call.settings) is not None


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
    database, ended = active.call.settings.transaction, outcome_of(command)
    try:
        row = None
        if ended.state is State.FAILED and not transaction.committed:
            transaction.rollback()  # the effects; the row of the error is claimed anew
            row = only(transaction.begin(transaction.claims))
        if row is None:
            row = await commit_with_outbox(active, transaction, ended)
        if row is not None:
            row = await publish_found(active, database, row)
    except Exception as error:
        transaction.rollback()
        if isinstance(error, StoreUnavailableError):
            await _requeue(active, error)
        if should_retry(active, error):
            await retry(active, error)
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
        and active.call.rollback_count < MAX_ROLLBACKS
        and is_transient(error)
    )


async def retry(active: ActiveExecution, error: BaseException) -> NoReturn:
    """Requeues the call, whose transaction the database has rolled back."""
    active.report(table.ROLLED_BACK, error=error)
    active.call.rollback_count += 1
    await _requeue(active, error)


async def _requeue(active: ActiveExecution, error: BaseException) -> NoReturn:
    decide(table.STORE_UNAVAILABLE, active.call)
    await _release(active)
    conflict.requeue(active.call, active.call.unanswered_ids, error)


async def _release(active: ActiveExecution) -> None:
    active.finish()
    try:
        await active.release()
    except IdempotencyError as error:
        active.report(table.NOT_RELEASED, error=error)


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
        active.report(table.ROW_NOT_REPEATED, error=error)
    active.settled = True
    active.finish()
    return record
