"""The publisher: publishes a task for each delivery, and collects the replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from celery import Task
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from .events import Deliveries, Delivery

REPLY_TIMEOUT_SECONDS = 30.0
#: How often a wait checks that the worker is running.
WORKER_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class Reply:
    """The reply to one delivery: the task's result, or the error that it raised."""

    delivery: Delivery
    outcome: dict[str, Any] | Exception

    @property
    def event_id(self) -> str:
        """The id of the event."""
        return self.delivery.payment.event_id


class Publisher:
    """Publishes deliveries as calls of `task` and collects the replies.

    `check_worker` raises if the worker has stopped; `on_reply` is called for each reply.
    """

    def __init__(
        self,
        task: Task,
        deliveries: Deliveries,
        check_worker: Callable[[], None],
        on_reply: Callable[[], None],
    ) -> None:
        self._task = task
        self._deliveries = deliveries
        self._check_worker = check_worker
        self._on_reply = on_reply
        self._pending: deque[tuple[Delivery, AsyncResult]] = deque()
        self._firsts: dict[str, AsyncResult] = {}
        self.replies: list[Reply] = []

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        # The destructor of a pending result connects to Redis, which may have stopped by then.
        for _, result in self._pending:
            result.backend = None

    def publish(self, deliveries: Iterable[Delivery]) -> None:
        """Publishes a message for each delivery, in order."""
        for delivery in deliveries:
            event_id = delivery.payment.event_id
            if self._deliveries.reuses_id(delivery):
                # The first amount must be charged first, not whichever wins a race in the pool.
                self._wait(self._firsts[event_id])
            result = self._task.apply_async(kwargs=asdict(delivery.payment))
            self._firsts.setdefault(event_id, result)
            self._pending.append((delivery, result))

    def collect(self) -> None:
        """Waits for the reply to every published delivery."""
        while self._pending:
            delivery, result = self._pending[0]
            self.replies.append(Reply(delivery, self._wait(result)))
            self._pending.popleft()
            self._on_reply()

    def _wait(self, result: AsyncResult) -> Any:
        deadline = time.monotonic() + REPLY_TIMEOUT_SECONDS
        while True:
            try:
                return result.get(timeout=WORKER_CHECK_SECONDS, propagate=False)
            except CeleryTimeoutError as timeout:
                self._check_worker()
                if time.monotonic() > deadline:
                    return timeout
