"""The outbox: messages that a body publishes on commit, stored in the row of its outcome.

A process that dies between the COMMIT and the functions of Django's ``on_commit`` would lose them:
the next execution finds the row, and does not run the body. Therefore the messages are committed
in the row, published, and then removed from it. An execution that finds a row with messages
publishes them again, under the same task ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import IdempotencyError, StoreUnavailableError, TransactionError
from celery_idempotent.events import table
from celery_idempotent.executor.soft_limit import at_row
from celery_idempotent.payload.fields import OUTBOX
from celery_idempotent.record.payload import Payload
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, Ended, Row
from celery_idempotent.sql.transaction import Found, Transaction

if TYPE_CHECKING:
    from celery_idempotent.executor.active_execution import ActiveExecution


async def begin_at_rows(
    executions: Sequence[ActiveExecution], transaction: Transaction, claims: Sequence[Claim]
) -> list[Found | None]:
    """As :meth:`Transaction.begin`, after what earlier ones have left to be published is.

    Raises:
        Interrupted: if a soft time limit was reached while another transaction had a row.
        StoreUnavailableError: if the broker or the database is unavailable.
        TransactionError: inside a transaction of the caller.
    """
    while True:
        found = at_row(partial(transaction.begin, claims))
        left = [
            (active, row)
            for active, row in zip(executions, found, strict=True)
            if isinstance(row, Row) and row.outbox is not None
        ]
        if not left:
            return found
        transaction.rollback()
        for active, row in left:
            await publish_found(active, transaction.database, row)


async def commit_with_outbox(
    active: ActiveExecution, transaction: Transaction, ended: Ended
) -> Row | None:
    """As :meth:`Transaction.commit`, with what the body publishes on commit.

    Raises:
        TransactionError: also if what the body has registered for the commit is refused.
        StoreUnavailableError: also if the messages are committed, and not published.
    """
    if transaction.outbox is None:
        transaction.outbox = await outbox_of(active, transaction.on_commit)
    (claim,) = transaction.claims
    row = transaction.commit({str(claim.key): ended._replace(outbox=transaction.outbox)})
    if row is None and transaction.outbox is not None:
        await publish_outbox(active, transaction.database, claim, transaction.outbox)
    return row


async def publish_found(active: ActiveExecution, database: Database, row: Row) -> Row:
    """Publishes what another execution has committed and may not have published; returns the row.

    Raises:
        As :func:`publish_outbox`.
    """
    if row.outbox is None:
        return row
    active.report(table.OUTBOX_FOUND)
    await publish_outbox(active, database, row, row.outbox)
    return row._replace(outbox=None)


async def outbox_of(
    active: ActiveExecution, functions: Sequence[Callable[[], Any]]
) -> bytes | None:
    """The outbox of the messages that `functions` publish; None if there are none.

    Raises:
        TransactionError: if one of them does something else, or its message cannot be stored.
    """
    if not functions:
        return None
    execution, settings = active.execution, active.call.settings
    payload = Payload("json", active.call.store_messages(functions))
    payload = await active.codec.protect(
        payload, settings, key=execution.key, token=execution.token, field=OUTBOX
    )
    if not payload.has_value:
        raise TransactionError(
            f"{execution.key}: the messages that it publishes on commit cannot be stored with its "
            f"outcome: {payload.body.decode()}"
        )
    return payload.format.encode() + b"\n" + payload.body


async def publish_outbox(
    active: ActiveExecution, database: Database, row: Row | Claim, outbox: bytes
) -> None:
    """Publishes the messages that are committed in `row`, and removes them from it.

    Raises:
        StoreUnavailableError: if the broker or the database is unavailable.
        CorruptRecordError: if the messages cannot be decoded.
    """
    key = active.execution.key
    form, _, body = outbox.partition(b"\n")
    payload = Payload(form.decode(), body)
    messages = await active.codec.decode_outbox(payload, key)
    try:
        active.call.publish_messages(messages)
    except IdempotencyError:
        raise
    except Exception as error:
        raise StoreUnavailableError(
            f"{key} is committed, and the broker does not take the messages that it publishes on "
            f"commit: {type(error).__name__}"
        ) from error
    database.clear_outbox(row)
    await active.codec.delete_object(payload, key, OUTBOX)
