"""The thread that renews the visibility timeout of a worker's unacknowledged messages.

It also searches for the messages of dead workers, and redelivers them, where the broker needs that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.lease.heartbeat import at_fork
from celery_idempotent.redelivery.broker import SOCKET_TIMEOUT, OwnConnection
from celery_idempotent.redelivery.unacked import UnackedMessages

logger = logging.getLogger(__name__)

#: Maximum seconds until a new message is first renewed, and between two searches for messages that
#: are to be redelivered.
TICK, RESTORE_INTERVAL = 1.0, 2.0
#: Maximum seconds between two reports that the worker keeps its messages.
REPORT_INTERVAL = 20.0

#: Called with the number of messages each time that all are renewed, at least every
#: REPORT_INTERVAL. `contrib.prometheus` adds a function.
on_renewed: list[Callable[[int], object]] = []


class Renewal(threading.Thread):
    """Renews the messages of one connection of the worker until :meth:`stop`.

    It has a thread of its own, because the solo pool runs tasks in the main thread.

    Args:
        seconds: from the last renewal of a message to its redelivery.
    """

    def __init__(self, broker: OwnConnection, unacked: UnackedMessages, seconds: float) -> None:
        super().__init__(name="idempotency-redelivery", daemon=True)
        self._broker = broker
        self.unacked = unacked
        self.seconds = seconds
        #: When all messages were last renewed (seconds since the epoch); None before the first
        #: time.
        self.renewed_at: float | None = None
        #: When to renew all messages, and when to search (seconds of `lease_now`).
        self._due = self._restore_due = 0.0
        #: How many rounds in a row have failed.
        self._failures = 0
        #: How many messages the last renewal of all messages had.
        self._number = 0
        #: When to call `on_renewed` (seconds of `lease_now`); 0: at the end of this round.
        self._report_due = 0.0
        self._ended = threading.Event()

    def stop(self) -> None:
        """Asks the thread to stop."""
        self._ended.set()

    def snapshot(self) -> dict[str, Any]:
        """Returns what `celery inspect` shows."""
        at = self.renewed_at
        return {
            "redeliver_after": self.seconds,
            "messages_held": len(self.unacked),
            "renewed_seconds_ago": None if at is None else round(time.time() - at, 3),
        }

    def run(self) -> None:
        """Renews and restores messages, and waits longer after each failure."""
        tick = min(TICK, self.seconds / 4)
        while not self._ended.wait(min(tick * 2**self._failures, self.seconds / 3)):
            with _no_fork:
                try:
                    self._renew()
                    self._restore()
                except Exception as error:
                    self._failed(error)
                else:
                    self._succeeded()
        with _no_fork:
            self._close()

    def _renew(self) -> None:
        """Renews all messages three times per `seconds`, and new ones at each call."""
        now = lease_now()
        is_due, messages = now >= self._due, self.unacked.new()
        if is_due:
            messages = self.unacked.all(self.seconds)
        if messages:
            self._broker.renew(messages, self.seconds)
            for message in messages:
                message.renewed_at = now
        if is_due:
            self._due, self.renewed_at = now + self.seconds / 3, time.time()
            self._number, self._report_due = len(messages), 0.0

    def _restore(self) -> None:
        if lease_now() >= self._restore_due:
            self._restore_due = lease_now() + min(RESTORE_INTERVAL, self.seconds / 3)
            self._broker.restore()

    def _failed(self, error: Exception) -> None:
        self._failures = min(self._failures + 1, 10)
        if self._failures == 1:
            number, then = len(self.unacked), ""
            if number:
                then = f"; this worker holds {number}, to be redelivered in {self.seconds:g} s"
            logger.warning("Cannot renew the visibility timeout of messages: %s%s", error, then)
        self._close()

    def _succeeded(self) -> None:
        if self._failures:
            self._failures = 0
            logger.warning("The visibility timeout of messages is renewed again")
        # Reported after the search, not after the renewal: without messages, only the search shows
        # whether the broker is available.
        now = lease_now()
        if now >= self._report_due:
            self._report_due = now + REPORT_INTERVAL
            for receive in on_renewed:
                receive(self._number)

    def _close(self) -> None:
        try:
            self._broker.close()
        except Exception as error:
            logger.debug("The connection could not be closed: %s", error)


class _NoFork:
    """Delays a fork of the worker's main process while the thread uses the broker.

    kombu's cached properties take locks that all connections share. If a pool process were forked
    while the thread has such a lock, it would wait for it for ever when it publishes.
    """

    def __init__(self) -> None:
        self._reset()
        at_fork(before=self._wait, after_in_parent=self._forked, after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._is_forking = False

    def _wait(self) -> None:
        # With a timeout: the pool must get its process even if the broker does not reply.
        self._is_forking = self._lock.acquire(timeout=2 * SOCKET_TIMEOUT)

    def _forked(self) -> None:
        if self._is_forking:
            self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_no_fork = _NoFork()

#: The renewal of this worker; None in other programs, and where messages have no visibility
#: timeout.
current: Renewal | None = None
