"""Executions in a database transaction: ``idempotency_transaction``.

The row of the key is claimed before the body runs; its outcome is committed with the effects, then
stored in Redis. From the commit on, the row decides: every caller gets its outcome, regardless of
Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.events import table
from celery_idempotent.events.report import report, report_refused
from celery_idempotent.extensions.outbox import (
    begin_at_rows,
    claim_of,
    commit_with_outbox,
    publish_found,
)
from celery_idempotent.extensions.steps import Steps
from celery_idempotent.flow import conflict, continuation, flow, replacement
from celery_idempotent.flow.active_call import ActiveCall, Extension, Plan
from celery_idempotent.flow.call import Complete, Delegate, Fail, Release
from celery_idempotent.flow.end import (
    AGAIN,
    GRANTED,
    Admission,
    Answer,
    End,
    Finished,
    Requeue,
    Settlement,
)
from celery_idempotent.flow.execution import BaseExecution
from celery_idempotent.flow.lockstep import await_effect
from celery_idempotent.flow.outcome import Failure, is_asynchronous
from celery_idempotent.flow.replay import replay_or_requeue
from celery_idempotent.flow.soft_limit import at_row
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.record.traceparent import append_traceparent
from celery_idempotent.settings import Settings
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import Claim, OutcomeValues, Row
from celery_idempotent.sql.transaction import Transaction
from celery_idempotent.store import commands
from celery_idempotent.store.scripts import Reply

#: The effects that the calls of a batch await, see `RowTransaction`.
CLAIM, COMMIT = "claim", "commit"

#: A message that was requeued this often for transient database errors ends with the next error.
MAX_ROLLBACKS = 20


def run_plain(settings: Settings, execution: BaseExecution, work: Callable[[], Any]) -> Any:
    """Runs `work` without protection; with ``idempotency_transaction``, in a plain transaction."""
    if settings.transaction is None:
        return work()
    with settings.transaction.plain_transaction() as session:
        execution._transaction = session  # noqa: SLF001 - the body reads its connection
        return work()


class Unprotected(Extension):
    """Runs the body as `run_plain` does, outside tasks: ``idempotency_enabled=False``."""

    async def before_begin(self) -> None:
        """Grants the call, or runs its body in a plain transaction."""
        call, database = self.call, self.call.settings.transaction
        execution = call.run_unprotected()
        if database is None:
            return
        try:
            with database.plain_transaction() as session:
                execution._transaction = session  # noqa: SLF001 - the body reads its connection
                call.outcome = await call.runtime.run(partial(call.host.run, execution))
                call.outcome.get()  # its error rolls back
        except GeneratorExit:
            raise
        except BaseException as error:
            call.outcome = Failure(error)


class RowTransaction(Extension):
    """Claims the row of the key, runs the body in the transaction, and commits it.

    Args:
        batch: the transaction of the batch that the call belongs to. The batch's handlers begin and
            commit it (see :class:`Lockstep`), and the batch rolls it back.
    """

    def __init__(self, call: ActiveCall, batch: Transaction | None = None) -> None:
        super().__init__(call)
        self.database: Database = call.settings.transaction
        self._in_batch = batch is not None
        self.transaction = batch or Transaction(
            self.database, lambda row: self._continues(row) or self._has_failed(row)
        )
        #: Of the row; set by each begin.
        self._claim: Claim

    async def admitted(self, admission: Admission) -> Admission:
        """Claims the row for a call that may run, or answers with the row's outcome."""
        if admission is GRANTED:
            return await self._begin()
        if isinstance(admission, Finished) and layout.is_poisoned(admission.record):
            return await self._reopen(admission)
        return admission

    async def _begin(self) -> Admission:
        call = self.call
        self._claim = claim_of(call)
        assert call.execution is not None
        call.protected = True  # by the row if there is no record
        call.execution._transaction = self.transaction  # noqa: SLF001 - the body reads its connection
        try:
            if self._in_batch:
                row: Row | None = await await_effect(CLAIM, (call, self._claim))
            else:
                (row,) = await begin_at_rows(self.transaction, [(call, self._claim)])
            row = row and row.with_outcome()
        except StoreUnavailableError as error:
            call.report(table.ROW_UNAVAILABLE, error=error)
            return await self._requeue(error)
        return GRANTED if row is None else await self._adopt(row)

    async def _reopen(self, poisoned: Finished) -> Admission:
        """Deletes the record of a poisoned key if one of its executions has committed.

        The next begin is then granted, and returns the outcome of the row.
        """
        call = self.call
        try:
            row = at_row(partial(Transaction(self.database).find, claim_of(call)))
            # The row of a task that replaced itself is not its outcome.
            if row is None or row.expired or (row.delegates and row.outbox is None):
                return poisoned
            await call.runtime.execute(commands.forget(call.key, poisoned.record))
        except StoreUnavailableError as error:
            report(table.ROW_UNKNOWN, call, error=error)
            report(table.STORE_UNAVAILABLE, call)
            return conflict.requeue(call, error)
        report(table.ROW_FOUND, call)
        return AGAIN

    def _continues(self, row: Row) -> bool:
        """Returns whether the call continues the task that replaced itself in this row."""
        if not row.delegates or row.task_id != self.call.task_id:
            return False
        return layout.read_awaited(row.body) <= self.call.data.generation

    def _has_failed(self, row: Row) -> bool:
        """Returns whether the row is that of another task, whose replacement has failed."""
        if row.task_id == self.call.task_id:
            return False
        record = row.record(self.call.key, self.call.codec.decode)
        return replacement.error_of(record, self.call.settings) is not None

    async def settling(self, settlement: Settlement) -> Settlement | End:
        """Commits the outcome, or rolls back before the key is released."""
        call, transaction, error = self.call, self.transaction, settlement.error
        disposition = settlement.disposition
        if isinstance(disposition, Release):
            self._roll_back(error)
            if error is not None and not disposition.hold and self._should_retry(error):
                return await self._retry(error)
            return settlement
        try:
            row: Row | None = None
            if isinstance(disposition, Fail) and not transaction.committed:
                # Rolls back the effects; the row is claimed again for the error.
                self._roll_back(error)
                (row,) = transaction.begin([self._claim])
            if row is None:
                row = await self._commit(settlement)
            if row is not None:
                row = await publish_found(call, self.database, row.with_outcome())
        except Exception as raised:
            self._roll_back()
            if isinstance(raised, StoreUnavailableError):
                return await self._requeue(raised)
            if self._should_retry(raised):
                return await self._retry(raised)
            failure = Failure(raised)
            if isinstance(disposition, Complete) and not self._in_batch:
                return await self.settling(await flow.settlement_of(call, failure))
            return Settlement(Release(), failure)
        if row is not None:
            return await self._adopt(row)
        settlement.committed = True
        return settlement

    async def _commit(self, settlement: Settlement) -> Row | None:
        """Commits the outcome; returns the row of another execution if that has committed one."""
        call = self.call
        if self._in_batch:
            return await await_effect(COMMIT, (call, self._claim, settlement))  # type: ignore[no-any-return]
        delegates = isinstance(settlement.disposition, Delegate)
        replacements = call.host.replacements if delegates else ()
        outcomes = {self._claim: ended_of(settlement)}
        return await commit_with_outbox(call, self.transaction, outcomes, replacements)

    def ended(self) -> None:
        """Rolls back what is not committed."""
        self._roll_back(discard=True)

    def _roll_back(self, error: BaseException | None = None, *, discard: bool = False) -> None:
        """Rolls back the transaction, unless it is that of a batch.

        Args:
            error: that of the body.
        """
        if not self._in_batch:
            discard = discard or (error is not None and is_asynchronous(error))
            self.transaction.rollback(discard=discard)

    def _should_retry(self, error: BaseException) -> bool:
        """Returns whether this database error requeues the call instead of failing it."""
        return self.call.data.rollback_count < MAX_ROLLBACKS and is_transient(error)

    async def _retry(self, error: BaseException) -> Requeue:
        """Requeues the call, whose transaction the database has rolled back."""
        self.call.report(table.ROLLED_BACK, error=error)
        requeued = await self._requeue(error)
        return requeued._replace(rollback_count=requeued.rollback_count + 1)

    async def _requeue(self, error: BaseException) -> Requeue:
        call = self.call
        report(table.STORE_UNAVAILABLE, call)
        await self._release()
        return conflict.requeue(call, error, call.data.unanswered_ids)

    async def _release(self) -> None:
        self._roll_back()
        self.call.stop_renewal()
        try:
            await self.call.release()
        except IdempotencyError as error:
            self.call.report(table.NOT_RELEASED, error=error)

    async def _adopt(self, row: Row) -> End:
        """Answers with the row that another execution committed, and copies it to Redis."""
        call = self.call
        record = row.record(call.key, call.codec.decode)
        fingerprint = call.key.fingerprint
        if fingerprint and record.fingerprint and record.fingerprint != fingerprint:
            await self._release()
            return Answer(
                Failure(report_refused(call, conflict.reused(record, call.host.difference))),
                record,
                refused=True,
            )
        if row.delegates and row.task_id != call.task_id:
            # With a record of this task, the replacement of the other one could not continue.
            await self._release()
            return await replay_or_requeue(call, record)
        try:
            reply = await self._repeat(row, record)
            if reply.case == "ok" and not row.delegates and call.data.continues:
                continuation.start(call)
        except (StoreUnavailableError, CorruptRecordError) as error:
            call.report(table.ROW_NOT_REPEATED, error=error)
        call.settled = True
        call.stop_renewal()
        return await replay_or_requeue(call, record)

    async def _repeat(self, row: Row, record: Record) -> Reply:
        """Copies the outcome of `row` to Redis."""
        store = commands.fail if record.state is State.FAILED else commands.complete
        # If the task replaced itself, the message that continues it sends the continuation.
        sending_ms = 0 if row.delegates else self.call.sending_ms
        payload = Payload(record.format, record.body)
        return await self.call.write(
            store(self.call.key, self.call.token, payload, row.remaining_ms, sending_ms=sending_ms)
        )


async def commit_together(
    transaction: Transaction, settlements: Sequence[tuple[ActiveCall, Claim, Settlement]]
) -> list[None]:
    """Commits the outcomes of a batch. The first row gets the messages that it publishes."""
    outcomes = {claim: ended_of(settlement) for _, claim, settlement in settlements}
    try:
        row = await commit_with_outbox(settlements[0][0], transaction, outcomes)
        if row is not None:
            raise StoreUnavailableError(f"{row.id}: another execution has committed first")
    except BaseException as error:
        transaction.rollback(discard=not isinstance(error, Exception))
        raise
    return [None] * len(settlements)


def ended_of(settlement: Settlement) -> OutcomeValues:
    """Returns the outcome for the row."""
    payload = settlement.payload
    assert payload is not None
    state = State.FAILED if isinstance(settlement.disposition, Fail) else State.COMPLETED
    format_ = append_traceparent(payload.format)
    return OutcomeValues(state, format_, payload.body, settlement.retention_ms)


def plan_for(settings: Settings) -> Plan:
    """Returns the extensions that the options of a call add to its flow."""
    if not settings.enabled:
        return Plan(Steps, (Unprotected,))
    return Plan(Steps, () if settings.transaction is None else (RowTransaction,))
