"""Requeues a message: publishes it again under its id."""

from __future__ import annotations

import time

from celery.app.task import Context
from celery.exceptions import Reject

from celery_idempotent.core.configuration import broker
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow.pass_ import Pass
from celery_idempotent.core.flow.values import Requeue
from celery_idempotent.core.task.message import republished
from celery_idempotent.core.task.message.message_headers import Waits
from celery_idempotent.core.task.publish import put_back
from celery_idempotent.errors import StoreUnavailableError


def requeue(
    call: Pass,
    request: Context,
    end: Requeue,
    *,
    waited: Waits | None,
    forgets: int,
    began_at: float,
) -> None:
    """Publishes the message again; afterwards this copy can be acknowledged.

    The order matters: a broker may acknowledge the original together with a copy. If publishing
    fails, this copy is requeued; if the broker is not available for that either, it will redeliver
    the copy on its own.

    Args:
        waited: as its headers say.
        forgets: as in its headers.
        began_at: seconds of `monotonic`.

    Raises:
        Reject: if the message cannot be published again.
    """
    task, seconds, record, waits = call.sender, end.seconds, end.record, None
    if end.fallback and record and not broker.quorum_queues(task.app):
        since_ms = waited.since_ms if waited else time.time_ns() // 1_000_000
        seconds, waits = end.fallback, Waits(since_ms, record.token, record.task_id[:255])
    headers = republished.with_derived_key(
        request.headers,
        call.key,
        call.task_id,
        requeue_count=call.data.requeue_count + 1,
        rollback_count=end.rollback_count,
        forgets=forgets,
        waits=waits,
    )

    # Its expiry is kept only in a header. Celery would also pass it to the broker, which drops
    # every expired message; a worker still runs one whose execution began before that.
    expires = request.expires
    if expires and task.app.conf.task_protocol == 2:
        headers, expires = {**headers, "expires": expires}, None
    pause = put_back.RequeuePause(task, request, began_at)
    seconds = min(seconds, put_back.longest_wait(task.app))
    options = {
        "countdown": seconds,
        "retries": request.retries,
        "headers": headers,
        "expires": expires,
        "add_to_parent": False,
    }
    while True:
        try:
            signature = task.signature_from_request(
                request, request.args, request.kwargs, **options
            )
            with put_back.confirming_producer(task.app) as producer:
                signature.apply_async(producer=producer)
            break
        except Exception as error:
            if not pause.wait(error):
                report(table.RETURNED, call, error=str(error), reason=end.reason)
                message = f"{end.reason}; and the message cannot be published again: {error}"
                raise Reject(message, requeue=True) from None
    outage = call.runtime.store.node_of(call.key).outage
    in_outage = outage.failed_calls and isinstance(end.reason, StoreUnavailableError)
    event = table.REQUEUED_IN_OUTAGE if in_outage else table.REQUEUED
    unless = " unless woken" if waits else ""
    report(event, call, seconds=seconds, unless=unless, reason=end.reason)
