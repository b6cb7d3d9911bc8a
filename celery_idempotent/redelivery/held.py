"""The messages of idempotent tasks that a worker has received but not acknowledged."""

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


class HeldMessage:
    """A message that runs, waits for a process of the pool, or waits for its ETA."""

    def __init__(self, request: Any) -> None:
        # Celery drops requests that it will not acknowledge, such as those of a lost connection.
        # The message, with its body, is dropped with its request.
        self._request = ref(request)
        #: Identifies the message in kombu's channel.
        self.delivery_tag: str = request.message.delivery_tag
        self.delivery_info: dict[str, Any] = request.message.delivery_info
        #: Seconds of `lease_now`.
        self.received_at = lease_now()
        self.renewed_at: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a process has taken it."""
        request = self._request()
        return request is not None and request.time_start is not None

    def is_held(self, since: float, frozen: frozenset[int]) -> bool:
        """Returns whether the worker still has the message.

        A message that was not renewed since the time `since` may belong to another worker by now:
        this one was frozen, or had lost its broker. A message that one of the `frozen` processes
        runs is left to another worker.
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


class HeldMessages:
    """The messages that one connection of the worker has received.

    Celery's thread adds messages, the thread of `Renewal` reads them.

    Args:
        pool: of the worker.
    """

    def __init__(self, app: Celery, pool: Any) -> None:
        self._pool = pool
        self._tasks = frozenset(
            task.name
            for task in app_tasks.enabled(app)
            if not task.idempotency_configuration.in_shadow
        )
        # A signal would cost more, and would be sent for every message of the worker.
        self._received: deque[ref[Any]] = deque()
        request.received = self._received
        self._held: list[HeldMessage] = []
        self._stopped = False

    def stop(self) -> None:
        """Keeps only messages that run: in a warm shutdown, Celery drops the others."""
        self._stopped = True

    def includes(self, headers: Mapping[str, Any] | None) -> bool:
        """Returns whether a message with these headers may safely be delivered twice."""
        headers = headers or {}
        return headers.get("task") in self._tasks and headers.get(EXPLICIT_KEY_HEADER) is not False

    def new(self) -> list[HeldMessage]:
        """Returns the unacknowledged messages that were received since the last call."""
        received = [self._received.popleft()() for _ in range(len(self._received))]
        new = [
            HeldMessage(each)
            for each in received
            if each is not None and not each.acknowledged and self.includes(each.request_dict)
        ]
        self._held += new
        return new

    def all(self, seconds: float) -> list[HeldMessage]:
        """Returns the messages that the worker still has, received or renewed within `seconds`."""
        since, counters = lease_now() - seconds, worker.counters
        frozen = counters.frozen_processes() if counters else frozenset()
        self._held = [
            held
            for held in self._held
            if held.is_held(since, frozen) and (held.has_begun or not self._stopped)
        ]
        if frozen and len(frozen) >= self._pool.num_processes:
            self._held = []  # no process is left for the messages that wait
        return self._held

    def __len__(self) -> int:
        return sum(held.is_held(0.0, frozenset()) for held in tuple(self._held))
