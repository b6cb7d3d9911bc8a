"""The messages of one worker that wait for the end of another call.

Celery's timer holds them until their ETA, unacknowledged. Here they form a queue for each key. A
thread watches the keys of all queues by CLIENT TRACKING, and the ends of their leases, which cause
no invalidation. It exists, and has connections, only while messages wait.

An outcome that answers all duplicates wakes the whole queue. Otherwise only one can begin: the
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
from itertools import count
from typing import Any

from kombu.asynchronous.timer import Entry

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.record import utc
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.tracking import POLL_INTERVAL, InvalidationListener
from celery_idempotent.core.task.message.message_headers import Waits
from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from celery_idempotent.waking.wait_queue import CLAIM_SECONDS, WaitingMessage, WaitQueue

logger = logging.getLogger(__name__)

#: Maximum messages that Celery's event loop starts at a time, before it handles other events.
SLICE = 100
#: Seconds without a waiting message after which the thread ends.
IDLE_TIMEOUT = 5.0
#: Seconds after which Redis is read again if it does not reply.
PAUSE = 1.0
#: Maximum keys that are read each second from servers that send no invalidations.
POLLS = 1000
#: Maximum task ids of one key in a snapshot.
SHOWN = 10
#: Seconds to wait after the end of a claim or a lease, so that it is over for Redis too.
_MARGIN = 0.005


class WaitingMessages:
    """The waiting messages of one connection of the worker.

    Celery's thread adds messages, and a thread of its own wakes them. Where Celery has an event
    loop (prefork pool), only that loop starts messages; writing to a pipe wakes it.

    Args:
        consumer: Celery's consumer of that connection.
    """

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self._queues: dict[tuple[RecordStore, str], WaitQueue] = {}
        self._listeners: dict[RecordStore, InvalidationListener] = {}
        #: A heap of times to read a queue's key (seconds of `monotonic`). An entry is out of date
        #: if its time is not `WaitQueue.due`. The number orders entries of the same time.
        self._due: list[tuple[float, int, WaitQueue]] = []
        self._number = count()
        #: When a store that has not replied is read again (seconds of `monotonic`).
        self._paused: dict[RecordStore, float] = {}
        #: Protects all these attributes; notified when the thread has something to do.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Messages that the event loop is to start, and the pipe that wakes it; no pipe without it.
        self._to_start: deque[WaitingMessage] = deque()
        self._pipe: tuple[int, int] | None = None

    def schedule(
        self,
        consumer: Any,
        call_at: Callable[..., Any],
        function: Callable[..., Any],
        args: Sequence[Any],
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Enters a message with an ETA into Celery's timer and, if it waits, into its queue.

        `core.task.receive.request` calls it in place of the timer's `call_at`.
        """
        request, queue = args[0] if args else None, None
        waits: Waits | None = getattr(request, "waits", None)
        with suppress(Exception):  # a key that cannot be derived is refused when it begins
            queue = self._queue_of(request) if waits and consumer is self.consumer else None
        if queue is None or waits is None:
            return call_at(function, args, *rest, **options)
        message = WaitingMessage(request, waits, self._remove, function, args)
        message.entry = call_at(message, args, *rest, **options)
        try:
            self._add(queue, message)
        except (OSError, RuntimeError) as error:  # no more files or threads
            extra = log_extra(str(queue.key), task_id=message.request.text_id)
            logger.warning(
                "%s is not woken, but runs at its ETA: %s", queue.key, error, extra=extra
            )
        return message.entry

    def _queue_of(self, request: Any) -> WaitQueue | None:
        key = request.key_and_generation[0]
        if key is None:
            return None
        store = request.task.idempotency_configuration.executor.store
        if store not in self._listeners:
            self._listeners[store] = store.listener()
        return WaitQueue(store, key, self._listeners[store], self._read_later)

    def _add(self, queue: WaitQueue, message: WaitingMessage) -> None:
        """Adds a message to the queue of its key: `queue`, or an older one for the same key."""
        with self._changed:
            queue = self._queues.setdefault((queue.store, queue.name), queue)
            queue.add(message)
            if not queue.is_held or message.is_copy:
                self._read_later(queue)
            if self._pipe is None and self.consumer.hub is not None:
                self._open_pipe()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="idempotency-waking", daemon=True)
                thread.start()
                self._thread = thread

    def _remove(self, message: WaitingMessage) -> None:
        with self._changed:
            queue = message.queue
            if queue is None:
                return
            with suppress(ValueError):
                queue.messages.remove(message)
            if not queue.messages:
                self._read_later(queue, IDLE_TIMEOUT)

    def _read_later(self, queue: WaitQueue, seconds: float = 0.0) -> None:
        """Makes the thread read the key of `queue` in `seconds`, unless it will do so earlier."""
        with self._changed:
            due = monotonic() + seconds
            if due < queue.due:
                queue.due = due
                heapq.heappush(self._due, (due, next(self._number), queue))
                self._changed.notify()

    def _run(self) -> None:
        while (queue := self._next()) is not None:
            try:
                if (left := self._paused.get(queue.store, 0.0) - monotonic()) > 0:
                    self._read_later(queue, left)
                else:
                    self._check(queue)
            except CorruptRecordError:
                self._wake(queue, [*queue.messages])  # their begins are refused
            except IdempotencyError as error:
                logger.debug("Cannot read what messages wait for: %s", error)
                self._paused[queue.store] = monotonic() + PAUSE
                self._read_later(queue, PAUSE)
            except Exception:
                extra = log_extra(str(queue.key))
                logger.exception("Cannot wake what waits for %s", queue.key, extra=extra)
                self._read_later(queue, IDLE_TIMEOUT)

    def _next(self) -> WaitQueue | None:
        """Waits for a queue whose key is to be read; returns None once the thread is to end."""
        with self._changed:
            idle_at = monotonic() + IDLE_TIMEOUT
            while not self._closed:
                now = monotonic()
                if self._queues:
                    idle_at = now + IDLE_TIMEOUT
                elif now >= idle_at:
                    break
                until = idle_at
                if self._due:
                    due, _, queue = self._due[0]
                    until = min(due, idle_at)
                    if due != queue.due or until <= now:
                        heapq.heappop(self._due)
                        if due != queue.due:
                            continue
                        queue.due = math.inf
                        return queue
                self._changed.wait(until - now)
            self._thread = None
            queues = [*self._queues.values()]  # empty if the thread ends because it was idle
        for queue in queues:
            queue.untrack()
        return None

    def _check(self, queue: WaitQueue) -> None:
        """Reads the key of `queue`; wakes those of its messages that may begin, and plans ahead."""
        with self._changed:
            if not queue.messages:
                if self._queues.get((queue.store, queue.name)) is queue:
                    del self._queues[queue.store, queue.name]
                    queue.untrack()
                return
        head, is_tracked = queue.read()
        if not is_tracked:
            self._read_later(queue, max(POLL_INTERVAL, len(self._queues) / POLLS))
        if head.at_ms and (left := queue.seconds_left(head)) > 0:
            self._read_later(queue, left + _MARGIN)
        with self._changed:
            ready = queue.ready(head)
        if queue.is_answered(head):
            self._wake(queue, ready)
        elif ready and (seconds := queue.pause()):
            self._read_later(queue, seconds + _MARGIN)
        elif ready:
            if queue.claim(ready[0], head):
                self._wake(queue, ready[:1])
            self._read_later(queue, CLAIM_SECONDS + _MARGIN)

    def _wake(self, queue: WaitQueue, messages: list[WaitingMessage]) -> None:
        with self._changed:
            if self._closed or not messages:
                return
            woken = set(messages)
            queue.messages = [message for message in queue.messages if message not in woken]
            timer = self.consumer.timer
            if self._pipe is not None:
                self._to_start.extend(messages)
                _write(self._pipe)
                return
        for message in messages:
            if isinstance(timer, threading.Thread):
                self._start(message)
            else:  # in a greenlet of its own, since starting blocks while the pool is full
                timer.call_after(0, self._start, (message,))

    def _open_pipe(self) -> None:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self.consumer.hub.add_reader(self._pipe[0], self._on_woken)

    def _on_woken(self, *_: Any) -> None:
        """Starts messages; Celery's event loop calls it when something was written to the pipe."""
        if self._pipe is None:
            return
        with suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        for _number in range(min(SLICE, len(self._to_start))):
            self._start(self._to_start.popleft())
        if self._to_start:
            _write(self._pipe)

    def _start(self, message: WaitingMessage) -> None:
        if self._closed:
            return
        try:
            self.consumer.timer.cancel(message.entry)
            if isinstance(message.entry, Entry):
                # The timer keeps a cancelled entry until its time. Without arguments,
                # `celery inspect scheduled` does not show it.
                message.entry.args = []
            message()
        except Exception:
            task_id = message.request.text_id
            logger.exception(
                "Task %s cannot be started", task_id, extra=log_extra(None, task_id=task_id)
            )
        if message.is_discarded and message.queue is not None:  # another one may be woken
            self._read_later(message.queue)

    def close(self) -> None:
        """Ends the thread: from now on, nothing is woken."""
        with self._changed:
            self._closed = True
            self._to_start.clear()
            self._changed.notify()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self.consumer.hub.remove(pipe[0])
            for end in pipe:
                os.close(end)

    def snapshot(self) -> list[dict[str, Any]]:
        """Returns what `celery inspect` shows: who waits for each key, longest wait first."""
        with self._changed:
            queues = [
                (each.key, each.holder, list(each.messages)) for each in self._queues.values()
            ]
        return [
            {
                "task": key.task,
                "key": str(key),
                "held_by": holder.task_id if holder else messages[0].waits.task_id,
                "messages": len(messages),
                "since": utc(messages[0].waits.since_ms / 1000).isoformat(),
                "task_ids": [message.request.text_id for message in messages[:SHOWN]],
            }
            for key, holder, messages in queues
            if messages
        ]


def _write(pipe: tuple[int, int]) -> None:
    with suppress(BlockingIOError):  # full: the event loop has enough to read
        os.write(pipe[1], b"w")


#: The waiting messages of this worker; None in other programs, and while it has no connection.
current: WaitingMessages | None = None
