"""The outbox: messages that a body publishes on commit, stored in the row of its outcome.

A process that dies between the COMMIT and the functions of Django's ``on_commit`` would lose them,
because the next execution finds the row and does not run the body. Therefore the messages are
committed in the row, then published, then removed from it. An execution that finds a row with
messages publishes them again, under the same task ids.

``delay_on_commit`` and ``apply_async_on_commit`` of Celery register a ``partial`` of the task's
method with Django's ``on_commit``, from which the message is known before the commit. Other
functions are refused: a process that dies after the commit would lose what they do.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from functools import partial
from logging import ERROR, WARNING
from typing import Any

from celery import Celery, Task
from celery.canvas import Signature
from celery.utils import uuid
from kombu import serialization

from celery_idempotent.core.events.report import CallIdentity, report
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.record import OUTBOX, Payload
from celery_idempotent.core.task.message import call_options, message_headers
from celery_idempotent.core.task.publish import put_back
from celery_idempotent.core.task.publish.replacement import last_signature, signatures
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    StoreUnavailableError,
    TransactionError,
)
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, OutcomeValues, Row
from celery_idempotent.sql.transaction import Transaction

OUTBOX_FOUND = Event(WARNING, "publishes the messages of an execution that was committed")
MESSAGE_DROPPED = Event(
    ERROR, "has committed; its message of {message} is refused, and dropped: {error}"
)

#: The arguments of `Task.apply_async` by position.
_APPLY_ASYNC = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")


def claim_of(call: Call) -> Claim:
    """Returns the claim of the row of the key, for the execution of `call`."""
    grant = call.grant
    return Claim.of(
        call.key,
        call.runtime.store.config.prefix,
        task_id=call.task_id,
        worker=call.data.worker,
        token=grant.token if grant is not None else 0,
        attempt=grant.execution.attempt if grant is not None else 0,
    )


async def begin_at_row(call: Call, transaction: Transaction, claim: Claim) -> Row | None:
    """Begins `transaction`, after publishing the messages that an earlier one left in the row.

    Returns:
        As :meth:`Transaction.begin`.

    Raises:
        StoreUnavailableError: if the broker or the database is unavailable.
        TransactionError: if called inside a transaction of the caller.
    """
    while True:
        row = transaction.begin(claim)
        if row is None or row.outbox is None:
            return row
        await publish_found(call, transaction.database, row)


async def commit_with_outbox(
    call: Call,
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
        transaction.outbox = await outbox_of(
            call, claim.token, [*transaction.on_commit, *replacements]
        )
    outbox, refusal = transaction.outbox, None
    row = transaction.commit(claim, outcome._replace(outbox=outbox))
    if row is None and outbox is not None:
        refusal = await publish_outbox(call, transaction.database, claim, outbox)
    return row, refusal


async def publish_found(call: Call, database: Database, row: Row) -> Row:
    """Publishes the messages that another execution left in `row`; returns the row without them.

    Raises:
        As :func:`publish_outbox`.
    """
    if row.outbox is None:
        return row
    call.report(OUTBOX_FOUND)
    await publish_outbox(call, database, row, row.outbox)
    return row._replace(outbox=None)


async def outbox_of(call: Call, token: int, functions: Sequence[Callable[[], Any]]) -> bytes | None:
    """Returns the outbox of the messages that `functions` publish; None if there are none.

    Raises:
        TransactionError: if a function does something else, or its message cannot be stored.
    """
    if not functions:
        return None
    key = str(call.key)
    payload = Payload("json", store(key, call.host.app, functions))
    payload = await call.codec.protect(payload, call.settings, key=key, token=token, field=OUTBOX)
    if not payload.format:
        raise TransactionError(
            f"{key}: the messages that it publishes on commit cannot be stored with its "
            f"outcome: {payload.body.decode()}"
        )
    return payload.to_bytes()


async def publish_outbox(
    call: Call, database: Database, row: Row | Claim, outbox: bytes
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
        refusal = publish(key, call.host.app, call.task_id, stored)
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


def store(key: str, app: Celery | None, functions: Sequence[Callable[[], Any]]) -> bytes:
    """Returns the messages that `functions` publish, with their task ids.

    Args:
        key: the key of the call whose body registered the functions.
        app: the app that publishes the messages.

    Raises:
        TransactionError: if a function does something else, or its message cannot be stored.
    """
    return json.dumps([_stored(key, app, function) for function in functions]).encode()


def _stored(key: str, app: Celery | None, function: Callable[[], Any]) -> list[str]:
    name = _name(function)
    try:
        signature = _signature(function)
    except Exception as error:
        raise _refused(key, name, f"{type(error).__name__}: {error}") from error
    if signature is None:
        raise TransactionError(
            f"{key}: on_commit({name}) would be lost if the process died after the COMMIT; publish "
            "a task instead, with delay_on_commit() or on_commit(functools.partial(task.delay, …))"
            ", or pass robust=True if it may be lost"
        )
    if app is None:
        raise _refused(key, name, "pass the Celery app to Idempotency() instead of a URL")
    if signature.app is not app:
        raise _refused(key, name, f"{signature.task} belongs to another Celery app")
    first = next(part for part in signatures(signature) if not getattr(part, "tasks", None))
    serializer = first.options.get("serializer") or getattr(
        app.tasks.get(first.task), "serializer", app.conf.task_serializer
    )
    try:
        # A copy, made by writing and reading it: a signature object that occurs twice in a canvas
        # becomes two, which get two task ids.
        signature = load(app, dump(signature, serializer))
        for single in signatures(signature):
            single.options.setdefault("task_id", uuid())
            call_options.check("apply_async", single.options)
            message_headers.of_options(single.task, "", single.options, in_shadow=False)
        return dump(signature, serializer)
    except Exception as error:
        raise _refused(key, name, f"{type(error).__name__}: {error}") from error


def _refused(key: str, name: str, reason: str) -> TransactionError:
    return TransactionError(f"{key}: the message of {name} cannot be stored: {reason}")


def publish(
    key: str, app: Celery | None, task_id: str, messages: Sequence[Sequence[str]]
) -> Exception | None:
    """Publishes the messages that :func:`store` returned.

    A message that can never be published, such as one with wrong arguments, is logged, and its
    error becomes its result.

    Args:
        key: the key of the call whose body published them.
        task_id: the task id of that call.

    Returns:
        The error of the last message, if that can never be published.

    Raises:
        CorruptRecordError: if they cannot be read.
        TransactionError: without an app.
        Exception: the broker's error.
    """
    if app is None:
        raise TransactionError(
            f"{key}: its row has messages that another process did not publish; pass the Celery "
            "app to Idempotency() instead of a URL"
        )
    unavailable = put_back.broker_errors(app)
    try:
        stored = [load(app, message) for message in messages]
    except Exception as error:
        reason = type(error).__name__
        raise CorruptRecordError(
            f"{key}: the messages that it publishes on commit cannot be read: {reason}"
        ) from error
    refusal = None
    for signature in stored:
        refusal = None
        try:
            signature.apply_async()
        except unavailable:
            raise
        except Exception as error:
            call = CallIdentity(None, "", task_id, key)
            report(MESSAGE_DROPPED, call, message=signature.task, error=error)
            refusal = error
            if (last := last_signature(signature)) is not None:
                app.backend.mark_as_failure(last.id, error)
    return refusal


def _signature(function: Any) -> Signature | None:
    """Returns the signature that `function` publishes; None if it does something else."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(function, partial):
        function, args, kwargs = function.func, function.args, function.keywords
    owner, method = getattr(function, "__self__", None), getattr(function, "__func__", None)
    if not isinstance(owner, (Task, Signature)):
        return None
    options: dict[str, Any] = {}
    if method not in (Task.delay, Signature.delay):
        if function.__name__ != "apply_async":
            return None
        names = _APPLY_ASYNC if isinstance(owner, Task) else _APPLY_ASYNC[:2]
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names):
            raise TypeError("too many positional arguments of apply_async")
        args, kwargs = options.pop("args", None) or (), options.pop("kwargs", None) or {}
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(owner, Task):
        return owner.signature(tuple(args), kwargs).set(**options)
    return owner.clone(args, kwargs, **options)


def dump(signature: Signature, serializer: str) -> list[str]:
    """Returns `signature` in a form that JSON can hold."""
    content_type, encoding, body = serialization.dumps(dict(signature), serializer)
    data = body.encode(encoding) if isinstance(body, str) else body
    return [content_type, encoding, b64encode(data).decode()]


def load(app: Celery, message: Sequence[str]) -> Signature:
    """Returns the signature that :func:`dump` stored; raises errors of any kind."""
    content_type, encoding, data = message
    accept = serialization.prepare_accept_content(app.conf.accept_content)
    value = serialization.loads(b64decode(data), content_type, encoding, accept=accept)
    return Signature.from_dict(value, app=app)


def _name(function: Any) -> str:
    if isinstance(function, partial):
        return f"partial({_name(function.func)})"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (Task, Signature)):
        return f"{owner.name if isinstance(owner, Task) else owner.task}.{function.__name__}"
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__ or 'builtins'}.{kind.__qualname__}"
