"""The outbox: messages that a body publishes on commit, stored in the row of its outcome.

A process that dies between the COMMIT and the functions of Django's ``on_commit`` would lose them,
because the next execution finds the row and does not run the body. Therefore the messages are
committed in the row, then published, then removed from it. An execution that finds a row with
messages publishes them again, under the same task ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from logging import WARNING
from typing import Any

from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow.pass_ import Pass
from celery_idempotent.core.flow.soft_limit import at_row
from celery_idempotent.core.record import OUTBOX, Payload
from celery_idempotent.errors import IdempotencyError, StoreUnavailableError, TransactionError
from celery_idempotent.extensions import messages
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, OutcomeValues, Row
from celery_idempotent.sql.transaction import Transaction

OUTBOX_FOUND = Event(WARNING, "publishes the messages of an execution that was committed")


def claim_of(call: Pass) -> Claim:
    """Returns the claim of the row of the key, for the execution of `call`."""
    prefix = call.runtime.store.config.prefix
    attempt = call.execution.attempt if call.execution is not None else 0
    return Claim.of(
        call.key,
        prefix,
        task_id=call.task_id,
        worker=call.data.worker,
        token=call.token,
        attempt=attempt,
    )


async def begin_at_row(call: Pass, transaction: Transaction, claim: Claim) -> Row | None:
    """Begins `transaction`, after publishing the messages that an earlier one left in the row.

    Returns:
        As :meth:`Transaction.begin`.

    Raises:
        SoftLimitReached: if a soft time limit was reached while waiting for another transaction.
        StoreUnavailableError: if the broker or the database is unavailable.
        TransactionError: if called inside a transaction of the caller.
    """
    while True:
        row = at_row(partial(transaction.begin, claim))
        if row is None or row.outbox is None:
            return row
        await publish_found(call, transaction.database, row)


async def commit_with_outbox(
    call: Pass,
    transaction: Transaction,
    claim: Claim,
    outcome: OutcomeValues,
    replacements: Sequence[Callable[[], Any]] = (),
) -> tuple[Row | None, Exception | None]:
    """As :meth:`Transaction.commit`; the row gets the messages of the body.

    Args:
        replacements: functions that publish the canvas that replaces the task of `call`.

    Returns:
        Also the error of the last message, if that can never be published.

    Raises:
        TransactionError: also if a function that the body registered for the commit is refused.
        StoreUnavailableError: also if the messages are committed but not published.
    """
    if transaction.outbox is None:
        transaction.outbox = await outbox_of(call, [*transaction.on_commit, *replacements])
    outbox, refusal = transaction.outbox, None
    row = transaction.commit(claim, outcome._replace(outbox=outbox))
    if row is None and outbox is not None:
        refusal = await publish_outbox(call, transaction.database, claim, outbox)
    return row, refusal


async def publish_found(call: Pass, database: Database, row: Row) -> Row:
    """Publishes the messages that another execution left in `row`; returns the row without them.

    Raises:
        As :func:`publish_outbox`.
    """
    if row.outbox is None:
        return row
    call.report(OUTBOX_FOUND)
    await publish_outbox(call, database, row, row.outbox)
    return row._replace(outbox=None)


async def outbox_of(call: Pass, functions: Sequence[Callable[[], Any]]) -> bytes | None:
    """Returns the outbox of the messages that `functions` publish; None if there are none.

    Raises:
        TransactionError: if a function does something else, or its message cannot be stored.
    """
    if not functions:
        return None
    key = str(call.key)
    payload = Payload("json", messages.store(key, call.host.app, functions))
    payload = await call.codec.protect(
        payload, call.settings, key=key, token=call.token, field=OUTBOX
    )
    if not payload.format:
        raise TransactionError(
            f"{key}: the messages that it publishes on commit cannot be stored with its "
            f"outcome: {payload.body.decode()}"
        )
    return payload.to_bytes()


async def publish_outbox(
    call: Pass, database: Database, row: Row | Claim, outbox: bytes
) -> Exception | None:
    """Publishes the messages that are committed in `row`, and removes them from it.

    Returns:
        The error of the last one, if that can never be published.

    Raises:
        StoreUnavailableError: if the broker or the database is unavailable.
        CorruptRecordError: if the messages cannot be decoded.
    """
    key = str(call.key)
    payload = Payload.from_bytes(outbox)
    stored = await call.codec.decode_field(payload, key, OUTBOX)
    try:
        refusal = messages.publish(key, call.host.app, call.task_id, stored)
    except IdempotencyError:
        raise
    except Exception as error:
        raise StoreUnavailableError(
            f"{key} is committed, but the broker does not accept the messages that it publishes "
            f"on commit: {type(error).__name__}"
        ) from error
    database.clear_outbox(row)
    await call.codec.delete_object(payload, key, OUTBOX)
    return refusal
