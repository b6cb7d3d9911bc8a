"""The ledger: a list of all executions, written by the task bodies.

It is stored in a Redis database that no contestant uses, so that scenarios are evaluated
independently of the libraries and of the result backend.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from redis import Redis

from tests.waiting import POLL_INTERVAL, eventually

#: How long a held execution waits at most, in seconds: a failed scenario leaves none behind.
MAX_HOLD = 60.0


@dataclass(frozen=True)
class Run:
    """One execution of a task body; times are those of the monotonic clock."""

    task_id: str
    pid: int
    started_at: float
    #: None while it runs, or if it was killed.
    ended_at: float | None = None


class Ledger:
    """Written by workers and read by scenarios."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url, decode_responses=True)

    @contextmanager
    def execution(self, order: str, task_id: str) -> Iterator[None]:
        """Records the start and the end of an execution, and waits while its order is held."""
        number = uuid4().hex
        start = {"task_id": task_id, "pid": os.getpid(), "started_at": time.monotonic()}
        self._redis.rpush(f"runs:{order}", json.dumps([number, start]))
        deadline = time.monotonic() + MAX_HOLD
        while self._redis.exists(f"held:{order}") and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        yield
        self._redis.hset(f"ends:{order}", number, time.monotonic())

    def hold(self, order: str) -> None:
        """Lets every execution of `order` wait until :meth:`release`."""
        self._redis.set(f"held:{order}", "1")

    def release(self, order: str) -> None:
        """Lets the executions of `order` continue."""
        self._redis.delete(f"held:{order}")

    def runs(self, order: str) -> list[Run]:
        """Returns the executions of `order`, by their start."""
        ends = self._redis.hgetall(f"ends:{order}")
        starts = map(json.loads, self._redis.lrange(f"runs:{order}", 0, -1))
        return [
            Run(**start, ended_at=float(ends[number]) if number in ends else None)
            for number, start in starts
        ]

    def completions(self, order: str) -> list[Run]:
        """Returns the executions of `order` that have ended."""
        return [run for run in self.runs(order) if run.ended_at is not None]

    def wait_for_run(self, order: str, number: int = 1) -> Run:
        """Waits until the `number`-th execution of `order` has started, and returns it."""
        runs = eventually(
            lambda: runs if len(runs := self.runs(order)) >= number else None,
            f"execution {number} of {order} has started",
        )
        return runs[number - 1]


def max_concurrent(runs: Sequence[Run]) -> int:
    """Returns the largest number of executions that ran at the same time."""
    changes = [(run.started_at, 1) for run in runs]
    changes += [(run.ended_at, -1) for run in runs if run.ended_at is not None]
    running = maximum = 0
    for _, change in sorted(changes):
        running += change
        maximum = max(maximum, running)
    return maximum
