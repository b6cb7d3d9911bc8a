"""How long a worker keeps a message that it cannot publish again, before it requeues it.

A requeued message is delivered again at once, so there has to be a pause. Quorum queues count
deliveries, and by default RabbitMQ 4 drops a message after 20 of them: the pause grows with that
count. Publishing is tried again all the while, so a long pause ends as soon as the broker takes
messages again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import shared_counters
from celery_idempotent.configuration import broker

if TYPE_CHECKING:
    from celery.app.task import Context

#: Seconds before a message is requeued for the first time, and between two tries to publish it.
REQUEUE_PAUSE = 1.0
#: Each requeue of one message multiplies its pause by this.
PAUSE_FACTOR = 4
#: Seconds: the longest pause. It occupies a slot of the pool, and with the default prefetch
#: multiplier a message waits for four others: all within RabbitMQ's consumer timeout of 30 minutes.
LONGEST_PAUSE = 300.0

#: Seconds that a message may wait in a worker where the transport does not say: half of the
#: half-hour after which RabbitMQ gives a worker up that keeps one; Redis waits an hour.
LONGEST_WAIT = 900.0

#: Where RabbitMQ counts how often a quorum queue has delivered a message in vain.
DELIVERY_COUNT_HEADER = "x-delivery-count"


class RequeuePause:
    """The pause before one delivery of a message is requeued.

    Args:
        began_at: monotonic seconds; when the task's time limit has begun to count.
    """

    def __init__(self, task: Task, request: Context, began_at: float) -> None:
        self._seconds = _pause(task, request, began_at)
        self._over_at = time.monotonic() + self._seconds

    def wait(self, error: BaseException) -> bool:
        """After `error`, sleep until the next try; False where the message is to be requeued now.

        A soft time limit ends the pause, since the hard one follows, and so does a shutdown.
        """
        left = self._over_at - time.monotonic()
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
        # The worker acknowledges a message whose process it kills.
        pause = min(pause, (began_at + hard_limit - time.monotonic()) / 2)
    return min(pause, LONGEST_PAUSE, longest_wait(task.app))


def longest_wait(app: Celery) -> float:
    """Seconds that a message may wait in a worker for its time without being delivered again.

    A broker takes one that waits longer for lost.
    """
    visible_again = broker.visibility_timeout(app)
    return min(LONGEST_WAIT, visible_again / 2) if visible_again else LONGEST_WAIT
