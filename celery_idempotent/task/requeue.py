"""Times of messages: until an eta, and before a message is requeued that cannot be published again.

A requeued message is redelivered at once, so the worker pauses before it requeues one. Quorum
queues count deliveries, and by default RabbitMQ 4 drops a message after 20 of them: the pause grows
with that count. The worker goes on trying to publish during the pause, so a long one ends as soon
as the broker accepts messages again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_idempotent import shared_counters
from celery_idempotent.clock import monotonic
from celery_idempotent.configuration import broker

if TYPE_CHECKING:
    from celery.app.task import Context

#: Seconds before the first requeue of a message, and between two attempts to publish it.
REQUEUE_PAUSE = 1.0
#: Each requeue of one message multiplies its pause by this.
PAUSE_FACTOR = 4
#: Seconds: the longest pause. It occupies a slot of the pool, and with the default prefetch
#: multiplier a message waits for four others: all within RabbitMQ's consumer timeout of 30 minutes.
LONGEST_PAUSE = 300.0

#: Seconds that a message may wait in a worker where the transport has no visibility timeout: half
#: of RabbitMQ's consumer timeout.
LONGEST_WAIT = 900.0

#: The header in which RabbitMQ counts the deliveries of a message from a quorum queue.
DELIVERY_COUNT_HEADER = "x-delivery-count"


class RequeuePause:
    """The pause before one delivery of a message is requeued.

    Args:
        began_at: monotonic seconds; when the task's time limit has begun to count.
    """

    def __init__(self, task: Task, request: Context, began_at: float) -> None:
        self._seconds = _pause(task, request, began_at)
        self._ends_at = monotonic() + self._seconds

    def wait(self, error: BaseException) -> bool:
        """Sleeps until the next attempt to publish; returns False to requeue the message now.

        A soft time limit ends the pause, because the hard one follows, and so does a shutdown.

        Args:
            error: of the last attempt.
        """
        left = self._ends_at - monotonic()
        counters = shared_counters.current
        shutting_down = counters is not None and counters.shutting_down
        if isinstance(error, SoftTimeLimitExceeded) or shutting_down or left <= 0:
            return False
        try:
            time.sleep(min(left, REQUEUE_PAUSE))
        except SoftTimeLimitExceeded:
            return False
        return True


def _pause(task: Task, request: Context, began_at: float) -> float:
    deliveries = (request.headers or {}).get(DELIVERY_COUNT_HEADER) or 0
    pause: float = REQUEUE_PAUSE * PAUSE_FACTOR ** min(deliveries, 10)
    hard_limit = (request.timelimit or (None,))[0] or task.time_limit
    if hard_limit:
        # The worker acknowledges the message of a process that it kills at the hard limit.
        pause = min(pause, (began_at + hard_limit - monotonic()) / 2)
    return min(pause, LONGEST_PAUSE, longest_wait(task.app))


def longest_wait(app: Celery) -> float:
    """Returns the seconds that a message may wait in a worker before the broker redelivers it."""
    visibility_timeout = broker.visibility_timeout(app)
    return min(LONGEST_WAIT, visibility_timeout / 2) if visibility_timeout else LONGEST_WAIT


def seconds_until(when: float | datetime | str | None) -> float:
    """Returns the seconds until a countdown (seconds) or an eta; 0 for one in the past, and None.

    An eta may be ISO 8601 text, as in a message. One without a time zone is in UTC, as in a worker.
    """
    if isinstance(when, (datetime, str)):
        eta: datetime = maybe_make_aware(maybe_iso8601(when), timezone.utc)
        return max(0.0, (eta - datetime.now(timezone.utc)).total_seconds())
    return float(when or 0.0)


def hold_for(options: Mapping[str, Any], lease: float) -> float:
    """Returns the seconds for which a key is reserved for a message published with `options`.

    One lease beyond the eta of the message, but not beyond its expiry.
    """
    hold = seconds_until(options.get("eta") or options.get("countdown")) + lease
    expires = options.get("expires")
    return hold if expires is None else min(hold, max(0.0, seconds_until(expires)))
