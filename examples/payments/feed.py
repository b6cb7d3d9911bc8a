"""The endpoint's side: publish a task for each delivery, and keep every caller's answer."""

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

ANSWER_TIMEOUT_SECONDS = 30.0
#: How often a wait looks up to see whether the worker is still there.
GLANCE_SECONDS = 0.5


@dataclass(frozen=True)
class Answer:
    """What the publisher of one delivery got: the task's result, or the error that it raised."""

    delivery: Delivery
    outcome: dict[str, Any] | Exception

    @property
    def event_id(self) -> str:
        """The event that was delivered."""
        return self.delivery.payment.event_id


class Feed:
    """Publishes deliveries as calls of `task` and collects the answers.

    `check_worker` raises when nobody is left to answer; `on_answer` is told of each answer.
    """

    def __init__(
        self,
        task: Task,
        deliveries: Deliveries,
        check_worker: Callable[[], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._task = task
        self._deliveries = deliveries
        self._check_worker = check_worker
        self._on_answer = on_answer
        self._pending: deque[tuple[Delivery, AsyncResult]] = deque()
        self._firsts: dict[str, AsyncResult] = {}
        self.answers: list[Answer] = []

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        # A result that is still awaited turns to Redis when it is collected as garbage, and waits
        # long for a server that is gone by then.
        for _, result in self._pending:
            result.backend = None

    def publish(self, deliveries: Iterable[Delivery]) -> None:
        """Send a message for each delivery, in order."""
        for delivery in deliveries:
            event_id = delivery.payment.event_id
            if self._deliveries.reuses_id(delivery):
                # Which of two amounts comes first must not hang on a race between pool children.
                self._wait(self._firsts[event_id])
            result = self._task.apply_async(kwargs=asdict(delivery.payment))
            self._firsts.setdefault(event_id, result)
            self._pending.append((delivery, result))

    def collect(self) -> None:
        """Wait until everything that was published is answered."""
        while self._pending:
            delivery, result = self._pending[0]
            self.answers.append(Answer(delivery, self._wait(result)))
            self._pending.popleft()
            self._on_answer()

    def _wait(self, result: AsyncResult) -> Any:
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while True:
            try:
                return result.get(timeout=GLANCE_SECONDS, propagate=False)
            except CeleryTimeoutError as timeout:
                self._check_worker()
                if time.monotonic() > deadline:
                    return timeout
