"""The heartbeat: one daemon thread per process that extends its leases."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import Leases, by_store, log_renewal_failure
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync

logger = logging.getLogger(__name__)

#: Seconds, at least, before the thread counts as late, since a busy machine delays it.
LEAST_DELAY = 1.0

_FOREVER = float("inf")


class Heartbeat:
    """Extends leases from :meth:`start_renewal` to :meth:`stop_renewal`.

    The thread starts with the first lease. A forked child has none of its parent's threads and
    leases, so it starts with an empty set. A thread that has died, or does not return from a
    request, is replaced when the next lease is added or removed.

    There is no lock, because a signal handler that raises could leave it locked.
    """

    def __init__(self) -> None:
        #: Called each time that a thread has died or is late.
        self.on_replaced: Callable[[], object] = lambda: None
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._leases: Leases[RecordStore] = Leases()
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakes_at = _FOREVER
        #: Seconds of `lease.clock` by which the thread finishes its current wait or request.
        self._expected_by = _FOREVER

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extends `lease` from now on."""
        self._leases.held.add(lease)
        self._check_thread()
        if lease.due < self._wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Stops extending it; the reply to a request that is being sent is ignored."""
        self._leases.held.discard(lease)
        if self._leases.held:
            self._check_thread()

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this process."""
        return tuple(self._leases.held)

    def _check_thread(self) -> None:
        """Starts a thread unless there is one that runs and is not late."""
        current, late = self._thread, monotonic() - self._expected_by
        if current is not None and current.is_alive() and late <= 0:
            return
        if current is not None:
            self.on_replaced()
            logger.error(
                "The idempotency heartbeat %s; another thread goes on with %d leases",
                f"is {late:.1f} s late" if current.is_alive() else "has died",
                len(self._leases.held),
            )
        self._expected_by = _FOREVER
        thread = threading.Thread(
            target=lambda: self._run(thread), name="idempotency-heartbeat", daemon=True
        )
        self._thread = thread
        thread.start()

    def _run(self, thread: threading.Thread) -> None:
        while self._thread is thread:  # else it was replaced
            try:
                self._extend(*self._wait_for_due(), thread)
            except Exception:
                # The other leases must still be extended.
                logger.exception("Unexpected error in the idempotency heartbeat, which continues")

    def _wait_for_due(self) -> tuple[list[Lease[RecordStore]], float]:
        while True:
            # Infinite while the set is read, so that a lease added meanwhile wakes the thread.
            self._wakes_at = _FOREVER
            due, now = self._leases.next_due, monotonic()
            if due <= now:
                return self._leases.take_due()
            self._expect(due)
            self._wakes_at = due
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=min(due - now, threading.TIMEOUT_MAX))

    def _expect(self, at: float) -> None:
        """Counts as late from a third of the shortest lease after `at` on."""
        shortest = min((lease.seconds for lease in self.held()), default=_FOREVER)
        self._expected_by = at + max(shortest / 3, LEAST_DELAY)

    def _extend(
        self, due: list[Lease[RecordStore]], timeout: float, thread: threading.Thread
    ) -> None:
        for store, leases in by_store(due).items():
            sent_at = monotonic()
            self._expect(sent_at + 2 * timeout)
            try:
                replies = run_sync(store.extend([lease.extension for lease in leases], timeout))
            except IdempotencyError as error:
                log_renewal_failure(leases, error)
            else:
                if self._thread is not thread:
                    return
                self._leases.apply_replies(leases, replies, sent_at)


#: The heartbeat of this process.
heartbeat = Heartbeat()
