"""The ledger: what really happened, as the task bodies themselves tell it.

"It ran once" is judged here, never by the library's own records or by a result backend. The ledger
lives in a Redis database that the library does not know of. A test also uses it to hold an order:
a task that handles a held order waits until the test releases it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import uuid4

from celery import Celery
from redis import Redis

from celery_idempotent import Record
from tests.waiting import POLL_INTERVAL, eventually

#: Longest that a task waits for its release, so that a failed test leaves nothing behind.
HELD_AT_MOST = 100.0


@dataclass(frozen=True)
class Run:
    """One execution of a task body."""

    task_id: str | None
    pid: int
    #: Seconds since the epoch.
    started_at: float
    #: ``self.idempotency``, as the body saw it.
    key: str
    token: int
    attempt: int
    recovered: bool
    protected: bool
    #: "returned", or the name of what it raised; None while it runs, and for ever if it was killed.
    end: str | None = None


@dataclass(frozen=True)
class Heard:
    """A signal, as a handler in the worker heard it."""

    name: str
    #: Name of the task that sent it.
    sender: str
    details: dict[str, Any]


class Ledger:
    """Written by workers, read by tests."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url, decode_responses=True)

    @staticmethod
    def of(app: Celery) -> Ledger:
        """The ledger that goes with `app`."""
        return _open(app.conf.shop_ledger)

    # What workers write.

    @contextmanager
    def run(self, order: str, task_id: str | None, execution: Any) -> Iterator[None]:
        """Write down that a run begins, waits while its order is held, and how it ends."""
        number = uuid4().hex
        begun = {
            "task_id": task_id,
            "pid": os.getpid(),
            "started_at": time.time(),
            **{name: getattr(execution, name) for name in _OF_EXECUTION},
        }
        self._redis.rpush(f"runs:{order}", json.dumps([number, begun]))
        try:
            self.wait_for_release(order)
            yield
        except BaseException as error:
            self._redis.hset(f"ends:{order}", number, type(error).__name__)
            raise
        self._redis.hset(f"ends:{order}", number, "returned")

    def hear(self, name: str, sender: str, details: dict[str, Any]) -> None:
        """Write down a signal."""
        line = json.dumps([name, sender, details], default=_as_told)
        self._redis.rpush(f"signals:{details['task_id']}", line)

    def note(self, order: str, text: str) -> None:
        """Write down whatever a task has to say."""
        self._redis.rpush(f"notes:{order}", text)

    def wait_for_release(self, order: str) -> None:
        """Wait while `order` is held."""
        deadline = time.monotonic() + HELD_AT_MOST
        while self._redis.exists(f"held:{order}"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"order {order} was never released")
            time.sleep(POLL_INTERVAL)

    def die_if_told(self, moment: str, task_id: str) -> None:
        """Kill this process if a test wants the task to die at this moment: once."""
        if self._redis.delete(f"kill:{moment}:{task_id}"):
            os.kill(os.getpid(), signal.SIGKILL)

    # What tests ask, and do.

    def kill_once(self, moment: str, task_id: str) -> None:
        """Let the task's process die after its outcome is stored: "before" its continuation is
        sent, or "after" that and before the message is acknowledged.
        """
        self._redis.set(f"kill:{moment}:{task_id}", "1")

    def hold(self, order: str) -> None:
        """Let every run of `order` wait, until :meth:`release`."""
        self._redis.set(f"held:{order}", "1")

    def release(self, order: str) -> None:
        """Let them go on."""
        self._redis.delete(f"held:{order}")

    def release_all(self) -> None:
        """Let everybody go on: the test is over."""
        for name in self._redis.scan_iter("held:*"):
            self._redis.delete(name)

    def runs(self, order: str) -> list[Run]:
        """Every execution for `order`, in the order in which they began."""
        ends = self._redis.hgetall(f"ends:{order}")
        begun = map(json.loads, self._redis.lrange(f"runs:{order}", 0, -1))
        return [Run(**facts, end=ends.get(number)) for number, facts in begun]

    def wait_for_run(self, order: str, number: int = 1) -> Run:
        """The `number`-th execution for `order`, as soon as it has begun."""
        runs = eventually(
            lambda: found if len(found := self.runs(order)) >= number else None,
            f"run {number} of order {order}",
        )
        return runs[number - 1]

    def notes(self, order: str) -> list[str]:
        """What tasks had to say."""
        return self._redis.lrange(f"notes:{order}", 0, -1)

    def signals(self, task_id: str, *names: str) -> list[Heard]:
        """The signals about a task, in order; only those of `names`, if any are given."""
        lines = map(json.loads, self._redis.lrange(f"signals:{task_id}", 0, -1))
        return [Heard(*line) for line in lines if not names or line[0] in names]

    def wait_for_signal(self, task_id: str, name: str, number: int = 1) -> Heard:
        """The `number`-th such signal about a task, as soon as it was heard."""
        heard = eventually(
            lambda: found if len(found := self.signals(task_id, name)) >= number else None,
            f"signal {name} ({number}) of task {task_id}; heard: {self.signals(task_id)}",
        )
        return heard[number - 1]


_OF_EXECUTION = ("key", "token", "attempt", "recovered", "protected")
_OF_RECORD = ("state", "key", "task", "task_id", "worker", "token", "attempt")


def _as_told(value: Any) -> Any:
    if isinstance(value, Record):
        return {name: getattr(value, name) for name in _OF_RECORD}
    if isinstance(value, BaseException):
        return [type(value).__name__, *map(_as_argument, value.args)]
    return repr(value)


def _as_argument(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else repr(value)


@cache
def _open(url: str) -> Ledger:
    return Ledger(url)
