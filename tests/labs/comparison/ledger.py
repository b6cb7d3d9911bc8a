"""The ledger: every execution, as the task bodies themselves tell it.

It lives in a Redis database that no contestant knows of. Nothing is judged by what a library, or a
result backend, says of itself.
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

#: Longest that a held task waits, so that a scenario which fails leaves nothing behind.
HELD_AT_MOST = 60.0


@dataclass(frozen=True)
class Run:
    """One execution of a task body. Times are of the machine's monotonic clock."""

    task_id: str
    pid: int
    began_at: float
    #: None while it runs, and for ever if it was killed.
    ended_at: float | None = None


class Ledger:
    """Written by workers, read by scenarios."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url, decode_responses=True)

    @contextmanager
    def run(self, order: str, task_id: str) -> Iterator[None]:
        """Write down that a run begins and returns; let it wait while its order is held."""
        number = uuid4().hex
        begun = {"task_id": task_id, "pid": os.getpid(), "began_at": time.monotonic()}
        self._redis.rpush(f"runs:{order}", json.dumps([number, begun]))
        deadline = time.monotonic() + HELD_AT_MOST
        while self._redis.exists(f"held:{order}") and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        yield
        self._redis.hset(f"ends:{order}", number, time.monotonic())

    def hold(self, order: str) -> None:
        """Let every run of `order` wait, until :meth:`release`."""
        self._redis.set(f"held:{order}", "1")

    def release(self, order: str) -> None:
        """Let them go on."""
        self._redis.delete(f"held:{order}")

    def runs(self, order: str) -> list[Run]:
        """Every execution for `order`, in the order in which they began."""
        ends = self._redis.hgetall(f"ends:{order}")
        begun = map(json.loads, self._redis.lrange(f"runs:{order}", 0, -1))
        return [
            Run(**facts, ended_at=float(ends[number]) if number in ends else None)
            for number, facts in begun
        ]

    def completions(self, order: str) -> list[Run]:
        """Those of them that have ended."""
        return [run for run in self.runs(order) if run.ended_at is not None]

    def wait_for_run(self, order: str, number: int = 1) -> Run:
        """The `number`-th execution for `order`, as soon as it has begun."""
        found = eventually(
            lambda: runs if len(runs := self.runs(order)) >= number else None,
            f"run {number} of {order}",
        )
        return found[number - 1]


def run_sync(runs: Sequence[Run]) -> int:
    """How many of `runs` were under way at the same moment, at most."""
    moments = [(run.began_at, 1) for run in runs]
    moments += [(run.ended_at, -1) for run in runs if run.ended_at is not None]
    current_execution = most = 0
    for _, change in sorted(moments):
        current_execution += change
        most = max(most, current_execution)
    return most
