"""The messages of one worker that wait for the end of another call.

Celery's timer holds them until their ETA, unacknowledged. Here they stand in a line for each key. A
thread watches the keys of all lines by CLIENT TRACKING, and the ends of their leases, which cause
no invalidation. It exists, and has connections, only while messages wait.

An outcome that answers all duplicates wakes the whole line. Otherwise only one can begin: the
workers that have waiting messages compete for the right to wake one after each end of an execution.
A message that does not begin within a second gives way to the next.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.record.record import utc
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.tracking import POLL_INTERVAL, InvalidationListener
from celery_idempotent.core.task.message.message_headers import Waits
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.waking.line import CLAIM_SECONDS, Line, Waiter

logger = logging.getLogger(__name__)

#: Messages that the event loop starts before it turns to its other events.
SLICE = 100
#: Seconds without a waiting message after which the thread ends.
IDLE_TIMEOUT = 5.0
#: Seconds after which Redis is read again if it does not reply.
PAUSE = 1.0
#: Records that are read a second where no invalidation announces their changes.
POLLS = 1000
#: Seconds that a claim and a lease are taken to be longer.
_MARGIN = 0.005


class WaitingRoom:
    """The waiting messages of one connection of the worker.

    Args:
        consumer: Celery's, of that connection.
    """

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self._lines: dict[tuple[RecordStore, str], Line] = {}
        self._listeners: dict[RecordStore, InvalidationListener] = {}
        #: Times to read a line, which are valid while they equal `Line.due`.
        self._due: list[tuple[float, int, Line]] = []
        self._number = count()
        self._paused_until = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Messages for the event loop, and the pipe that wakes it.
        self._woken: deque[Waiter] = deque()
        self._pipe: tuple[int, int] | None = None

    def schedule(
        self,
        call_at: Callable[..., Any],
        function: Callable[..., Any],
        args: Sequence[Any],
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Enters a message with an ETA into Celery's timer and, if it waits, into its line."""
        request, line = args[0] if args else None, None
        waits: Waits | None = getattr(request, "waits", None)
        with suppress(Exception):  # a key that cannot be derived is refused when it begins
            line = self._line(request) if waits else None
        if line is None or waits is None:
            return call_at(function, args, *rest, **options)
        waiter = Waiter(request, waits, partial(self._leave, line), function, args)
        waiter.entry = call_at(waiter, args, *rest, **options)
        self._enter(line, waiter)
        return waiter.entry

    def _line(self, request: Any) -> Line | None:
        key = request.idempotency_key()
        if key is None:
            return None
        store = request.task.idempotency_configuration.executor.store
        listener = self._listeners.setdefault(store, store.listener())
        return Line(store, key, listener, self._look_at)

    def _enter(self, line: Line, waiter: Waiter) -> None:
        with self._changed:
            line = self._lines.setdefault((line.store, line.name), line)
            line.add(waiter)
            if not line.is_held:
                self._look_at(line)
            if self._pipe is None and self.consumer.hub is not None:
                self._open_pipe()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="idempotency-waking", daemon=True
                )
                self._thread.start()

    def _leave(self, line: Line, waiter: Waiter) -> None:
        with self._changed:
            current = self._lines.get((line.store, line.name))
            if current is None:
                return
            with suppress(ValueError):
                current.waiters.remove(waiter)
            if not current.waiters:
                self._look_at(current, IDLE_TIMEOUT)

    def _look_at(self, line: Line, seconds: float = 0.0) -> None:
        """Has `line` read in `seconds`, unless it will be read before."""
        with self._changed:
            due = monotonic() + seconds
            if due < line.due:
                line.due = due
                heapq.heappush(self._due, (due, next(self._number), line))
                self._changed.notify()

    def _run(self) -> None:
        while (line := self._next()) is not None:
            try:
                self._serve(line)
            except IdempotencyError as error:
                logger.debug("Cannot read what messages wait for: %s", error)
                self._paused_until = monotonic() + PAUSE
                self._look_at(line, PAUSE)
            except Exception:
                extra = log_extra(str(line.key))
                logger.exception("Cannot wake what waits for %s", line.key, extra=extra)
                self._look_at(line, IDLE_TIMEOUT)

    def _next(self) -> Line | None:
        """Waits for a line that is to be read; returns None once the thread is to end."""
        with self._changed:
            idle_at = monotonic() + IDLE_TIMEOUT
            while not self._closed:
                now = max(monotonic(), self._paused_until)
                wait = self._paused_until - monotonic()
                while self._due and wait <= 0:
                    due, _, line = self._due[0]
                    if due != line.due:
                        heapq.heappop(self._due)
                    elif due <= now:
                        heapq.heappop(self._due)
                        line.due = math.inf
                        return line
                    else:
                        break
                if self._lines:
                    idle_at = now + IDLE_TIMEOUT
                elif now >= idle_at:
                    break
                until = self._due[0][0] if self._due else idle_at
                self._changed.wait(max(wait, until - now, 0))
            self._thread = None
        for line in self._lines.values():
            line.untrack()
        return None

    def _serve(self, line: Line) -> None:
        """Reads the record of `line`, and wakes the messages that its end concerns."""
        with self._changed:
            if not line.waiters:
                if self._lines.get((line.store, line.name)) is line:
                    del self._lines[line.store, line.name]
                    line.untrack()
                return
        head, is_tracked = line.read()
        if not is_tracked:
            self._look_at(line, max(POLL_INTERVAL, len(self._lines) / POLLS))
        if head.at_ms and (left := line.seconds_left(head)) > 0:
            self._look_at(line, left + _MARGIN)
        if line.is_held:
            return
        with self._changed:
            ready = line.ready(head)
        if line.is_answered(head):
            self._wake(line, ready)
        elif ready and (seconds := line.pause()):
            self._look_at(line, seconds + _MARGIN)
        elif ready:
            if line.claim(ready[0], head):
                self._wake(line, ready[:1])
            self._look_at(line, CLAIM_SECONDS + _MARGIN)

    def _wake(self, line: Line, waiters: list[Waiter]) -> None:
        with self._changed:
            if self._closed or not waiters:
                return
            woken = set(waiters)
            line.waiters = [waiter for waiter in line.waiters if waiter not in woken]
            timer = self.consumer.timer
            if self._pipe is not None:
                self._woken.extend(waiters)
                _write(self._pipe)
                return
        for waiter in waiters:
            if isinstance(timer, threading.Thread):
                self._start(waiter)
            else:  # in a greenlet of its own: a full pool blocks it
                timer.call_after(0, self._start, (waiter,))

    def _open_pipe(self) -> None:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self.consumer.hub.add_reader(self._pipe[0], self._on_woken)

    def _on_woken(self, *_: Any) -> None:
        """Starts messages in the event loop."""
        if self._pipe is None:
            return
        with suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        for _number in range(min(SLICE, len(self._woken))):
            self._start(self._woken.popleft())
        if self._woken:
            _write(self._pipe)

    def _start(self, waiter: Waiter) -> None:
        if self._closed:
            return
        try:
            self.consumer.timer.cancel(waiter.entry)
            waiter()
        except Exception:
            extra = log_extra(None, task_id=waiter.request.text_id)
            logger.exception("Task %s cannot be started", waiter.request.text_id, extra=extra)
        if waiter.is_discarded:
            with self._changed:
                lines = [line for line in self._lines.values() if line.has_woken(waiter)]
            for line in lines:
                self._look_at(line)

    def close(self) -> None:
        """Ends the thread: from now on, nothing is woken."""
        with self._changed:
            self._closed = True
            self._woken.clear()
            self._changed.notify()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self.consumer.hub.remove(pipe[0])
            for end in pipe:
                os.close(end)

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns what `celery inspect` shows: who waits for each key, longest wait first."""
        with self._changed:
            lines = [(line, list(line.waiters)) for line in self._lines.values()]
        return [
            {
                "task": line.key.task,
                "key": str(line.key),
                "held_by": waiters[0].waits.task_id,
                "messages": len(waiters),
                "since": utc(waiters[0].waits.since_ms / 1000).isoformat(),
                "task_ids": [waiter.request.text_id for waiter in waiters[:SHOWN]],
            }
            for line, waiters in lines
            if waiters
        ]


#: Task ids of one key in a snapshot.
SHOWN = 10


def _write(pipe: tuple[int, int]) -> None:
    with suppress(BlockingIOError):  # full: the event loop has enough to read
        os.write(pipe[1], b"w")


#: The room of this worker; None in other programs, and while nothing can be woken.
current: WaitingRoom | None = None
