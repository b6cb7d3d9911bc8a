"""Executions in a database transaction.

The row of the key is claimed before the body runs; its outcome is committed with the effects, then
stored in Redis. From the commit on, the row decides: every caller gets its outcome, regardless of
Redis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from logging import ERROR, WARNING
from typing import Any

from celery.backends.base import Backend

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow import conflict, flow
from celery_idempotent.core.flow.call import Call, Grant
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.replay import replacement_error, replay_or_put_back
from celery_idempotent.core.flow.values import (
    AGAIN,
    GRANTED,
    Admission,
    Complete,
    Delegate,
    End,
    Fail,
    Failure,
    Finished,
    PutBack,
    Release,
    Settlement,
    is_asynchronous,
)
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Payload, Record, State, layout
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import IdempotencyError, StoreUnavailableError
from celery_idempotent.extensions.outbox import (
    begin_at_row,
    claim_of,
    commit_with_outbox,
    publish_found,
)
from celery_idempotent.settings import Settings
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.errors import is_transient
from celery_idempotent.sql.outcomes import AWAITED_BYTES, Claim, OutcomeValues, Row
from celery_idempotent.sql.transaction import Transaction

ROW_UNAVAILABLE = Event(ERROR, "cannot claim its row: {error}")
ROW_UNKNOWN = Event(ERROR, "cannot determine whether it was committed: {error}")
ROW_FOUND = Event(WARNING, "was committed by an execution that died")
ROLLED_BACK = Event(WARNING, "ran; its transaction was rolled back ({error.__class__.__name__})")
ROW_NOT_REPEATED = Event(WARNING, "cannot copy the outcome of its row to its record: {error}")

#: A message that was put back this often for transient database errors ends with the next error.
MAX_ROLLBACKS = 20


class RowTransaction(Extension):
    """Claims the row of the key, runs the body in the transaction, and commits it."""

    blocks = "transaction"
    knows_poisoned = True  # an execution that died may have committed the row

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Returns the settings with the database, which is not connected yet."""
        return replace(settings, transaction=Database(settings.transaction))

    @classmethod
    def summary(cls, settings: Settings) -> str:
        """Returns the name of the database."""
        return f"transaction in {settings.transaction.engine.name}"

    @classmethod
    def findings(cls, task: Any) -> Iterator[Sequence[str]]:
        """Yields that Celery could retry writing a result, but does not."""
        backend = task.backend
        can_repeat = type(backend).exception_safe_to_retry is not Backend.exception_safe_to_retry
        if can_repeat and not (backend.always_retry or task.ignore_result):
            yield (
                *("result-retry", "warning", "result_backend_always_retry is off"),
                "result_backend_always_retry = True",
                "while the result backend is unavailable, callers of a committed task get an error",
            )

    @classmethod
    @contextlib.contextmanager
    def unprotected(cls, settings: Settings, execution: BaseExecution) -> Iterator[None]:
        """Runs the body in a plain transaction."""
        with settings.transaction.plain_transaction() as session:
            execution._transaction = session  # noqa: SLF001 - the body reads its connection
            yield

    @classmethod
    def forget(cls, settings: Settings, key: Key, forget_record: Callable[[], str]) -> str:
        """Also deletes the row of the key."""
        database: Database = settings.transaction
        return database.forget(settings.key_prefix, key, forget_record)

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        #: Functions that publish the canvas with which the body has replaced its task.
        self._replacements: list[Callable[[], Any]] = []
        self.database: Database = call.settings.transaction
        self.transaction = Transaction(
            self.database, lambda row: self._continues(row) or self._has_failed(row)
        )
        #: The grant of the last begin, and the claim of the row for it; `_begin` sets both.
        self._grant: Grant
        self._claim: Claim

    async def admitted(self, admission: Admission) -> Admission:
        """Claims the row for a call that may run, or answers with the row's outcome."""
        if admission is GRANTED:
            assert self.call.grant is not None
            return await self._begin(self.call.grant)
        if isinstance(admission, Finished) and layout.is_poisoned(admission.record):
            return await self._reopen(admission)
        return admission

    async def _begin(self, grant: Grant) -> Admission:
        call, self._grant = self.call, grant
        self._claim = claim_of(call)
        grant.protected = True  # by the row, even without a record
        grant.execution._transaction = self.transaction  # noqa: SLF001 - the body reads its connection
        try:
            row = await begin_at_row(call, self.transaction, self._claim)
            row = row and row.with_outcome()
        except StoreUnavailableError as error:
            call.report(ROW_UNAVAILABLE, error=error)
            return await self._put_back(error)
        return GRANTED if row is None else await self._adopt(row)

    async def _reopen(self, poisoned: Finished) -> Admission:
        """Deletes the record of a poisoned key if one of its executions has committed.

        The next begin is then granted, and returns the outcome of the row.
        """
        call = self.call
        try:
            row = Transaction(self.database).find(claim_of(call))
            # The row of a task that has replaced itself has no outcome, only messages to publish.
            if row is None or row.expired or (row.delegates and row.outbox is None):
                return poisoned
            await call.runtime.execute(commands.forget(call.key, poisoned.record))
        except StoreUnavailableError as error:
            report(ROW_UNKNOWN, call, error=error)
            report(table.STORE_UNAVAILABLE, call)
            return conflict.put_back(call, error)
        report(ROW_FOUND, call)
        return AGAIN

    def _continues(self, row: Row) -> bool:
        """Returns whether the call continues the task that replaced itself in this row."""
        if not row.delegates or row.task_id != self.call.task_id:
            return False
        return row.awaited <= self.call.data.generation

    def _has_failed(self, row: Row) -> bool:
        """Returns whether the row is that of another task, whose replacement has failed."""
        if row.task_id == self.call.task_id:
            return False
        record = row.record(self.call.key, self.call.codec.decode)
        return replacement_error(record, self.call.settings) is not None

    def replacing(self, publish: Callable[[], Any]) -> bool:
        """Publishes the replacement once the transaction is committed."""
        self._replacements.append(publish)
        return True

    async def settling(self, settlement: Settlement) -> Settlement | End:
        """Commits the outcome, or rolls back before the key is released."""
        call, transaction, error = self.call, self.transaction, settlement.error
        if isinstance(settlement, Release):
            self._roll_back(error)
            if error is not None and not settlement.hold and self._should_retry(error):
                return await self._retry(error)
            return settlement
        try:
            row: Row | None = None
            if isinstance(settlement, Fail) and not transaction.committed:
                # Rolls back the effects; the row is claimed again for the error.
                self._roll_back(error)
                row = transaction.begin(self._claim)
            if row is None:
                row = await self._commit(settlement)
            if row is not None:
                row = await publish_found(call, self.database, row.with_outcome())
        except Exception as raised:
            self._roll_back()
            if isinstance(raised, StoreUnavailableError):
                return await self._put_back(raised)
            if self._should_retry(raised):
                return await self._retry(raised)
            failure = Failure(raised)
            if isinstance(settlement, Complete):
                return await self.settling(await flow.settlement_of(self._grant, failure))
            return Release(failure)
        if row is not None:
            return await self._adopt(row)
        settlement.committed = True
        return settlement

    async def _commit(self, settlement: Settlement) -> Row | None:
        """Commits the outcome; returns the row of another execution if that has committed one."""
        delegates = isinstance(settlement, Delegate)
        row, refusal = await commit_with_outbox(
            self.call,
            self.transaction,
            self._claim,
            ended_of(settlement),
            self._replacements if delegates else (),
        )
        if delegates and refusal is not None:
            settlement.outcome = Failure(refusal)  # the replacement can never be published
        return row

    def ended(self) -> None:
        """Rolls back what is not committed."""
        self._roll_back(discard=True)

    def _roll_back(self, error: BaseException | None = None, *, discard: bool = False) -> None:
        """Rolls back the transaction.

        Args:
            error: that of the body.
        """
        discard = discard or (error is not None and is_asynchronous(error))
        self.transaction.rollback(discard=discard)

    def _should_retry(self, error: BaseException) -> bool:
        """Returns whether this database error puts the call back instead of failing it."""
        return self.call.data.rollback_count < MAX_ROLLBACKS and is_transient(error)

    async def _retry(self, error: BaseException) -> PutBack:
        """Puts the call back, whose transaction the database has rolled back."""
        self.call.report(ROLLED_BACK, error=error)
        end = await self._put_back(error)
        return end._replace(rollback_count=end.rollback_count + 1)

    async def _put_back(self, error: BaseException) -> PutBack:
        call = self.call
        report(table.STORE_UNAVAILABLE, call)
        await self._release()
        return conflict.put_back(call, error)

    async def _release(self) -> None:
        self._roll_back()
        try:
            await self._grant.release()
        except IdempotencyError as error:
            self.call.report(table.NOT_RELEASED, error=error)

    async def _adopt(self, row: Row) -> End:
        """Answers with the row that another execution committed, and copies it to Redis."""
        call = self.call
        record = row.record(call.key, call.codec.decode)
        fingerprint = call.key.fingerprint
        if fingerprint and record.fingerprint and record.fingerprint != fingerprint:
            await self._release()
            return conflict.refuse_reused(call, record)
        if row.delegates and row.task_id != call.task_id:
            # The row is not copied to Redis under the token of this call: the message that
            # continues the other task could then not begin.
            await self._release()
            return await replay_or_put_back(call, record)
        try:
            reply = await self._repeat(row, record)
            if reply.case == "ok" and self._sends(row):
                call.continuation_token = self._grant.token
        except StoreUnavailableError as error:
            call.report(ROW_NOT_REPEATED, error=error)
        return await replay_or_put_back(call, record)

    def _sends(self, row: Row) -> bool:
        """Returns whether this delivery sends the continuation of the task that has committed.

        If that has replaced itself, the message that continues it sends the continuation.
        """
        completed = row.state == State.COMPLETED.value and not row.delegates
        return completed and self.call.data.continues and row.task_id == self.call.task_id

    async def _repeat(self, row: Row, record: Record) -> Reply:
        """Copies the outcome of `row` to Redis."""
        settlement: Settlement
        if row.delegates:
            settlement = Delegate(awaited=row.awaited)
        elif record.state is State.FAILED:
            settlement = Fail()
        else:
            settlement = Complete(continues=self._sends(row))
        settlement.payload = Payload(record.format, record.body)
        settlement.retention_ms = row.remaining_ms
        return await self._grant.settle(flow.settle_command(self._grant, settlement))


def ended_of(settlement: Settlement) -> OutcomeValues:
    """Returns the outcome for the row."""
    payload = settlement.payload
    assert payload is not None
    state = State.FAILED if isinstance(settlement, Fail) else State.COMPLETED
    format_, body = payload.format, payload.body
    if commands.current_traceparent and (traceparent := commands.current_traceparent()):
        format_ = f"{format_} {traceparent}"
    if isinstance(settlement, Delegate):
        body = settlement.awaited.to_bytes(AWAITED_BYTES, "big") + body
    return OutcomeValues(state, format_, body, settlement.retention_ms)
