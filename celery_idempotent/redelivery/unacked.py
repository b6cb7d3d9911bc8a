"""The messages of idempotent tasks that a worker has received but not acknowledged.

Only these are renewed: a message that is delivered twice by mistake must not run twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import ref

from celery import Celery

from celery_idempotent.core import worker
from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.task.message.message_headers import EXPLICIT_KEY_HEADER
from celery_idempotent.core.task.receive import request

logger = logging.getLogger(__name__)


class UnackedMessage:
    """A message that runs, waits for a process of the pool, or waits for its ETA."""

    def __init__(self, request: Any) -> None:
        # A weak reference, because a request that nothing else refers to will not be acknowledged,
        # such as one of a lost connection. It also keeps no body of a message in memory.
        self._request = ref(request)
        #: Identifies the message in kombu's channel.
        self.delivery_tag: str = request.message.delivery_tag
        self.delivery_info: dict[str, Any] = request.message.delivery_info
        #: When it was received (seconds of `lease_now`).
        self.received_at = lease_now()
        #: When `Renewal` last renewed it (seconds of `lease_now`); None before the first time.
        self.renewed_at: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a process of the pool has begun to run it."""
        request = self._request()
        return request is not None and request.time_start is not None

    def is_owned(self, since: float, frozen: frozenset[int]) -> bool:
        """Returns whether the message is still this worker's.

        If it was not renewed since the time `since`, because this worker was frozen or had lost its
        broker, another worker may have it by now. A message whose process is one of the `frozen`
        ones (by pid) is left to another worker.
        """
        request = self._request()
        if request is None or request.acknowledged:
            return False
        if request.worker_pid in frozen:
            logger.warning(
                "Process %d does not renew its lease; task %s is left to another worker",
                request.worker_pid,
                request.id,
                extra=log_extra(None, task_id=request.id),
            )
            return False
        return (self.renewed_at or self.received_at) > since


class UnackedMessages:
    """The messages that one connection of the worker has received.

    Celery's thread adds messages, and the thread of `Renewal` reads them.

    Args:
        pool: that of the worker.
    """

    def __init__(self, app: Celery, pool: Any) -> None:
        self._pool = pool
        self._tasks = frozenset(
            task.name
            for task in app_tasks.enabled(app)
            if not task.idempotency_configuration.in_shadow
        )
        #: Each request of an idempotent task appends itself when it is received. Celery's signal
        #: would cost more, and would be sent for every message of the worker.
        self._received: deque[ref[Any]] = deque()
        request.received = self._received
        #: The messages that the worker still had at the last call of `all`, and those that `new`
        #: has added.
        self._messages: list[UnackedMessage] = []
        self._stopped = False

    def stop(self) -> None:
        """Leaves out, from now on, messages that no process runs: a warm shutdown drops them."""
        self._stopped = True

    def includes(self, headers: Mapping[str, Any] | None) -> bool:
        """Returns whether a message with these headers may safely be delivered twice."""
        headers = headers or {}
        return headers.get("task") in self._tasks and headers.get(EXPLICIT_KEY_HEADER) is not False

    def new(self) -> list[UnackedMessage]:
        """Returns the unacknowledged messages that were received since the last call."""
        received = [self._received.popleft()() for _ in range(len(self._received))]
        new = [
            UnackedMessage(each)
            for each in received
            if each is not None and not each.acknowledged and self.includes(each.request_dict)
        ]
        self._messages += new
        return new

    def all(self, seconds: float) -> list[UnackedMessage]:
        """Returns the messages that the worker still has, received or renewed within `seconds`."""
        since, counters = lease_now() - seconds, worker.counters
        frozen = counters.frozen_processes() if counters else frozenset()
        self._messages = [
            each
            for each in self._messages
            if each.is_owned(since, frozen) and (each.has_begun or not self._stopped)
        ]
        if frozen and len(frozen) >= self._pool.num_processes:
            self._messages = []  # no process is left for the messages that wait
        return self._messages

    def __len__(self) -> int:
        return sum(each.is_owned(0.0, frozenset()) for each in tuple(self._messages))
