"""A batch in one database transaction: ``idempotency_transaction``."""

from __future__ import annotations

from collections.abc import Sequence

from celery_idempotent.errors import KeyReusedError, StoreUnavailableError, TransactionError
from celery_idempotent.events import table
from celery_idempotent.events.report import decide_by, refuse, report
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.outbox import begin_at_rows, outbox_of, publish_outbox
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.transaction import (
    UnrecordedExecution,
    adopt_record,
    outcome_of,
)
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record.record import Record
from celery_idempotent.sql.transaction import Found, Transaction
from celery_idempotent.store.commands import Command


async def claim_many(
    granted: Sequence[tuple[ExecutorCall, ActiveExecution | BaseExecution]],
    transaction: Transaction,
    runtime: Runtime,
    codec: PayloadCodec,
) -> list[ActiveExecution | Record | KeyReusedError | TransactionError]:
    """Begins the transaction and claims the rows; what each call may do now.

    Raises:
        Interrupted: if a soft time limit was reached while another transaction had a row.
        StoreUnavailableError: if the database is unavailable.
        TransactionError: inside a transaction of the caller.
    """
    executions = [
        execution
        if isinstance(execution, ActiveExecution)
        else UnrecordedExecution(call, execution, runtime, codec)
        for call, execution in granted
    ]
    try:
        claims = [active.claim() for active in executions]
        found = await begin_at_rows(executions, transaction, claims)
    except BaseException as error:
        for call, _ in granted:
            decide_by(call, error)
        raise
    return [await _admission(active, row) for active, row in zip(executions, found, strict=True)]


async def _admission(
    active: ActiveExecution, found: Found | None
) -> ActiveExecution | Record | KeyReusedError | TransactionError:
    if found is None:
        active.decide()
        return active
    if isinstance(found, TransactionError):
        active.finish()
        await active.release()
        refuse(active.call, found)
        return found
    try:
        record = await adopt_record(active, found)
    except KeyReusedError as error:
        return error
    report(table.REPLAYED, active.call, record=record)
    return record


async def commit_many(
    executions: Sequence[ActiveExecution],
    commands: Sequence[Command],
    transaction: Transaction,
) -> None:
    """Commits the outcomes that `commands` store in Redis, or rolls back and raises.

    The first row has what the batch publishes on commit.

    Raises:
        StoreUnavailableError: also if the messages are committed, and not published.
    """
    first = executions[0]
    try:
        outbox = await outbox_of(first, transaction.on_commit)
        outcomes = {
            active.execution.key: outcome_of(command)
            for active, command in zip(executions, commands, strict=True)
        }
        key = first.execution.key
        outcomes[key] = outcomes[key]._replace(outbox=outbox)
        if transaction.commit(outcomes) is not None:
            raise StoreUnavailableError(
                f"{key}: the commit was lost, and another execution has committed"
            )
        if outbox is not None:
            claim = next(claim for claim in transaction.claims if str(claim.key) == key)
            await publish_outbox(first, transaction.database, claim, outbox)
    except BaseException as error:
        transaction.rollback(discard=not isinstance(error, Exception))
        raise
    for active in executions:
        # Redis is written to once: a later call can store an outcome that is committed.
        active.exiting = True
