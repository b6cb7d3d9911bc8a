"""The ledger: the executions and signals of tasks, written by the task bodies themselves.

Tests count executions here, not by the library's records or by a result backend. The ledger has its
own Redis database, which the library does not use. A test also uses it to hold an order: tasks wait
while their order is held.
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
from celery.result import AsyncResult
from redis import Redis

from celery_idempotent import Record
from tests.waiting import POLL_INTERVAL, eventually

#: Longest wait for the release of an order, in seconds: a failed test leaves no tasks behind.
MAX_HOLD = 100.0


@dataclass(frozen=True)
class Run:
    """One execution of a task body."""

    task_id: str | None
    pid: int
    #: Seconds since the epoch.
    started_at: float
    #: Attributes of ``self.idempotency`` in the body, with this library.
    key: str = ""
    token: int = 0
    attempt: int = 0
    recovered: bool = False
    protected: bool = False
    #: "returned", or the name of its exception, and when; None while it runs, or if it was killed.
    end: str | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class ReceivedSignal:
    """A signal that a receiver in the worker has recorded."""

    name: str
    #: The name of the task.
    sender: str
    details: dict[str, Any]


class Ledger:
    """Written by workers and read by tests."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url, decode_responses=True)

    @staticmethod
    def of(app: Celery) -> Ledger:
        """Returns the ledger of `app`."""
        return _open(app.conf.shop_ledger)

    # Workers

    @contextmanager
    def run(self, order: str, task_id: str | None, execution: Any = None) -> Iterator[None]:
        """Records the start and the end of an execution, which waits while its order is held."""
        number = uuid4().hex
        start = {"task_id": task_id, "pid": os.getpid(), "started_at": time.time()}
        if execution is not None:
            start |= {name: getattr(execution, name) for name in _EXECUTION_ATTRIBUTES}
        self._redis.rpush(f"runs:{order}", json.dumps([number, start]))
        end = "returned"
        try:
            self.wait_for_release(order)
            yield
        except BaseException as error:
            end = type(error).__name__
            raise
        finally:
            self._redis.hset(f"ends:{order}", number, json.dumps([end, time.time()]))

    def record_signal(self, name: str, sender: str, details: dict[str, Any]) -> None:
        """Records a signal."""
        line = json.dumps([name, sender, details], default=_to_json)
        self._redis.rpush(f"signals:{details['task_id']}", line)

    def note(self, order: str, text: str) -> None:
        """Records a text of a task."""
        self._redis.rpush(f"notes:{order}", text)

    def is_held(self, order: str) -> bool:
        """Returns whether `order` is held."""
        return bool(self._redis.exists(f"held:{order}"))

    def wait_for_release(self, order: str) -> None:
        """Waits while `order` is held."""
        deadline = time.monotonic() + MAX_HOLD
        while self._redis.exists(f"held:{order}"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"order {order} was never released")
            time.sleep(POLL_INTERVAL)

    def die_if_requested(self, moment: str, task_id: str) -> None:
        """Kills this process if :meth:`kill_once` has requested it for this moment."""
        if self._redis.delete(f"kill:{moment}:{task_id}"):
            os.kill(os.getpid(), signal.SIGKILL)

    # Tests

    def kill_once(self, moment: str, task_id: str) -> None:
        """Requests the death of the task's process after its outcome is stored: "before" its
        continuation is sent, when its result is "stored" and its chord does not count it yet, or
        "after" it and before the acknowledgement.
        """
        self._redis.set(f"kill:{moment}:{task_id}", "1")

    def hold(self, order: str) -> None:
        """Lets every execution of `order` wait until :meth:`release`."""
        self._redis.set(f"held:{order}", "1")

    def release(self, order: str) -> None:
        """Lets the executions of `order` continue."""
        self._redis.delete(f"held:{order}")

    def start(self, task: Any, order: str, *args: Any, **options: Any) -> AsyncResult:
        """Calls `task`, and returns when it runs; it waits until its order is released.

        The options are those of ``apply_async``.
        """
        self.hold(order)
        result: AsyncResult = task.apply_async((order, *args), **options)
        self.wait_for_run(order)
        return result

    def kill(self, order: str) -> Run:
        """Kills the process that runs `order`; returns its execution."""
        run = self.wait_for_run(order)
        os.kill(run.pid, signal.SIGKILL)
        return run

    def duplicate(self, task: Any, order: str, *args: Any, **options: Any) -> AsyncResult:
        """Calls `task`, and returns when the call has met a running execution.

        The options are those of ``apply_async``.
        """
        result: AsyncResult = task.apply_async((order, *args), **options)
        self.wait_for_signal(result.id, "conflicted")
        return result

    def release_all(self) -> None:
        """Releases all orders."""
        for name in self._redis.scan_iter("held:*"):
            self._redis.delete(name)

    def runs(self, order: str) -> list[Run]:
        """Returns the executions of `order`, by their start."""
        ends = self._redis.hgetall(f"ends:{order}")
        starts = map(json.loads, self._redis.lrange(f"runs:{order}", 0, -1))
        return [Run(**start, **_end(ends.get(number))) for number, start in starts]

    def wait_for_run(self, order: str, number: int = 1) -> Run:
        """Waits until the `number`-th execution of `order` has started, and returns it."""
        runs = eventually(
            lambda: runs if len(runs := self.runs(order)) >= number else None,
            f"execution {number} of order {order} has started",
        )
        return runs[number - 1]

    def notes(self, order: str) -> list[str]:
        """Returns the texts that tasks have recorded for `order`."""
        return self._redis.lrange(f"notes:{order}", 0, -1)

    def signals(self, task_id: str, *names: str) -> list[ReceivedSignal]:
        """Returns the signals of a task in order; only those of `names`, if given."""
        lines = map(json.loads, self._redis.lrange(f"signals:{task_id}", 0, -1))
        return [ReceivedSignal(*line) for line in lines if not names or line[0] in names]

    def wait_for_signal(self, task_id: str, name: str, number: int = 1) -> ReceivedSignal:
        """Waits for the `number`-th signal of that name, and returns it."""
        signals = eventually(
            lambda: signals if len(signals := self.signals(task_id, name)) >= number else None,
            f"signal {name} ({number}) of task {task_id}; received: {self.signals(task_id)}",
        )
        return signals[number - 1]


@contextmanager
def recorded_run(task: Any, order: str) -> Iterator[Ledger]:
    """Records an execution of `task`, as :meth:`Ledger.run`; yields the ledger."""
    ledger = Ledger.of(task.app)
    with ledger.run(order, task.request.id, getattr(task, "idempotency", None)):
        yield ledger


def _end(text: str | None) -> dict[str, Any]:
    return dict(zip(("end", "ended_at"), json.loads(text), strict=True)) if text else {}


_EXECUTION_ATTRIBUTES = ("key", "token", "attempt", "recovered", "protected")
RECORD_ATTRIBUTES = ("state", "key", "task", "task_id", "worker", "token", "attempt")


def _to_json(value: Any) -> Any:
    if isinstance(value, Record):
        return {name: getattr(value, name) for name in RECORD_ATTRIBUTES}
    if isinstance(value, BaseException):
        return [type(value).__name__, *map(_argument_to_json, value.args)]
    return repr(value)


def _argument_to_json(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else repr(value)


@cache
def _open(url: str) -> Ledger:
    return Ledger(url)
