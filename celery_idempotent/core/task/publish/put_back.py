"""Putting a received message back: it is published again, for a later delivery.

A message that cannot be published again is requeued. The broker redelivers it at once, so the
worker pauses before it requeues one. Quorum queues count deliveries, and by default RabbitMQ 4
drops a message after 20 of them, so the pause grows with that count. The worker keeps trying to
publish during the pause, which therefore ends as soon as the broker accepts messages again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Reject, SoftTimeLimitExceeded
from kombu import pools
from kombu.exceptions import OperationalError

from celery_idempotent.core import worker
from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.configuration import broker
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.values import PutBack
from celery_idempotent.core.task.message.message_headers import MessageHeaders, Waits
from celery_idempotent.core.task.publish.message_copy import without_x_death
from celery_idempotent.errors import StoreUnavailableError

#: Seconds before the first requeue of a message, and between two attempts to publish it.
REQUEUE_PAUSE = 1.0
#: Each requeue of one message multiplies its pause by this.
PAUSE_FACTOR = 4
#: The longest pause in seconds. It occupies a slot of the pool. With the default prefetch
#: multiplier, a message waits for four others: five pauses are shorter than RabbitMQ's consumer
#: timeout of 30 minutes.
LONGEST_PAUSE = 300.0

#: The longest wait of a message in a worker, in seconds, if the transport has no visibility
#: timeout: half of RabbitMQ's consumer timeout.
LONGEST_WAIT = 900.0

#: The header in which RabbitMQ counts the deliveries of a message from a quorum queue.
DELIVERY_COUNT_HEADER = "x-delivery-count"

#: The time in seconds for a broker to confirm a publish.
CONFIRM_TIMEOUT = 10


def put_back(
    call: Call, request: Context, end: PutBack, received: MessageHeaders, began_at: float
) -> None:
    """Publishes the message again; afterwards this copy can be acknowledged.

    The order matters: a broker may acknowledge the original together with a copy. If publishing
    fails, this copy is requeued; if the broker is not available for that either, it will redeliver
    the copy on its own.

    Args:
        received: the headers of the message.
        began_at: seconds of `monotonic`.

    Raises:
        Reject: if the message cannot be published again.
    """
    task, key, seconds, record, waits = call.sender, call.key, end.seconds, end.record, None
    # On quorum queues, RabbitMQ delays the message, and no worker could wake it.
    if end.fallback and record and not broker.quorum_queues(task.app):
        since_ms = received.waits.since_ms if received.waits else time.time_ns() // 1_000_000
        seconds, waits = end.fallback, Waits(since_ms, record.token, record.task_id[:255])
    seconds = min(seconds, longest_wait(task.app))
    count = received.put_back_count + 1
    headers = received._replace(
        key=key, put_back_count=count, rollback_count=end.rollback_count, waits=waits
    ).write(key.task, call.task_id, without_x_death(request.headers))
    pause = RequeuePause(task, request, began_at)
    while True:
        try:
            _publish_again(task, request, headers, seconds)
            break
        except Exception as error:
            if not pause.wait(error):
                report(table.RETURNED, call, error=str(error), reason=end.reason)
                message = f"{end.reason}; and the message cannot be published again: {error}"
                raise Reject(message, requeue=True) from None
    outage = call.runtime.store.node_of(key).outage
    in_outage = outage.failed_calls and isinstance(end.reason, StoreUnavailableError)
    event = table.PUT_BACK_IN_OUTAGE if in_outage else table.PUT_BACK
    unless = " unless woken" if waits else ""
    report(event, call, seconds=seconds, unless=unless, reason=end.reason)


def _publish_again(task: Task, request: Context, headers: dict[str, Any], countdown: float) -> None:
    """Publishes the message of `request` with these headers of this package."""
    expires = request.expires
    if expires and task.app.conf.task_protocol == 2:
        # Kept only in the header: Celery would also pass it to the broker, which drops every
        # expired message. A worker runs one whose execution began before it expired.
        headers, expires = {**headers, "expires": expires}, None
    options = {"countdown": countdown, "expires": expires, "add_to_parent": False}
    signature = task.signature_from_request(request, **options)
    signature.set(headers={**signature.options["headers"], **headers})
    request.idempotency_headers_again = signature.options["headers"]
    with confirming_producer(task.app) as producer:
        signature.apply_async(producer=producer)


@contextmanager
def confirming_producer(app: Celery) -> Iterator[Any]:
    """Yields a producer whose `publish` returns when the broker has accepted the message.

    A message is published again on one connection and then acknowledged on another. If the broker
    dies in between without accepting it, the acknowledgement drops the only copy. AMQP brokers
    confirm each publish, but Celery waits for that only with `confirm_publish`. Other transports
    reply to each publish, so the app's own producer suffices, and None is yielded.
    """
    timeouts = {"read_timeout": CONFIRM_TIMEOUT, "write_timeout": CONFIRM_TIMEOUT}
    connection = app.connection_for_write(transport_options={"confirm_publish": True, **timeouts})
    if connection.get_transport_cls().driver_type != "amqp":
        yield None
        return
    # Equal connections share one pool; this one only serves as its key.
    with pools.producers[connection].acquire(block=True) as producer:
        yield producer


def broker_errors(app: Celery) -> tuple[type[Exception], ...]:
    """Returns the errors of a publish after which another attempt may succeed."""
    connection = app.connection_for_write()
    errors = connection.recoverable_connection_errors + connection.recoverable_channel_errors
    return (OperationalError, OSError, StoreUnavailableError, *errors)


class RequeuePause:
    """The pause before one delivery of a message is requeued.

    Args:
        began_at: when the time limit of the task began, in monotonic seconds.
    """

    def __init__(self, task: Task, request: Context, began_at: float) -> None:
        deliveries = (request.headers or {}).get(DELIVERY_COUNT_HEADER) or 0
        pause: float = REQUEUE_PAUSE * PAUSE_FACTOR ** min(deliveries, 10)
        hard_limit = (request.timelimit or (None,))[0] or task.time_limit
        if hard_limit:
            # A worker that kills a process at the hard limit acknowledges its message.
            pause = min(pause, (began_at + hard_limit - monotonic()) / 2)
        self._seconds = min(pause, LONGEST_PAUSE, longest_wait(task.app))
        self._ends_at = monotonic() + self._seconds

    def wait(self, error: BaseException) -> bool:
        """Sleeps until the next attempt to publish; returns False to requeue the message now.

        A soft time limit ends the pause because the hard limit follows; a shutdown also ends it.

        Args:
            error: of the last attempt.
        """
        left = self._ends_at - monotonic()
        shutting_down = worker.counters and worker.counters.shutting_down
        if isinstance(error, SoftTimeLimitExceeded) or shutting_down or left <= 0:
            return False
        try:
            time.sleep(min(left, REQUEUE_PAUSE))
        except SoftTimeLimitExceeded:
            return False
        return True


def longest_wait(app: Celery) -> float:
    """Returns how many seconds a message may wait in a worker without being redelivered."""
    visibility_timeout = broker.visibility_timeout(app)
    return min(LONGEST_WAIT, visibility_timeout / 2) if visibility_timeout else LONGEST_WAIT
