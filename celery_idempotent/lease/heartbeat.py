"""The heartbeat: a daemon thread for each store in which this process holds leases."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import FOREVER, Renewer, Renewers
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync

logger = logging.getLogger(__name__)

#: Seconds, at least, before a thread counts as late, since a busy machine delays it.
LEAST_DELAY = 1.0
#: Seconds without a lease after which a thread ends.
IDLE_SECONDS = 60.0


class ThreadRenewer(Renewer):
    """The leases in one store, and the thread that extends them.

    It starts with the first lease. A thread that has died, or does not return from a request, is
    replaced when the next lease is added or removed.

    Args:
        on_replaced: called if the thread has died or is late.
    """

    def __init__(self, on_replaced: Callable[[], object]) -> None:
        super().__init__()
        self._on_replaced = on_replaced
        self.thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.wakes_at = FOREVER
        #: Seconds of `lease.clock` by which the thread finishes its current wait or request.
        self._expected_by = FOREVER

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `Renewer`."""
        self.held.add(lease)
        self._check_thread()
        if lease.due < self.wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `Renewer`."""
        self.held.discard(lease)
        if self.held:
            self._check_thread()

    def _check_thread(self) -> None:
        """Starts a thread unless there is one that runs and is not late."""
        current, late = self.thread, monotonic() - self._expected_by
        if current is not None and current.is_alive() and late <= 0:
            return
        if current is not None:
            self._on_replaced()
            logger.error(
                "The idempotency heartbeat %s; another thread goes on with %d leases",
                f"is {late:.1f} s late" if current.is_alive() else "has died",
                len(self.held),
            )
        self._expected_by = FOREVER
        thread = threading.Thread(
            target=lambda: self._run(thread), name="idempotency-heartbeat", daemon=True
        )
        self.thread = thread
        thread.start()

    def _run(self, thread: threading.Thread) -> None:
        while self.thread is thread:  # else it was replaced
            try:
                if self._wait_for_due():
                    self._extend(thread)
                elif self.thread is thread:
                    # First, so that a lease that is added from now on starts another thread.
                    self.thread = None
                    if self.held:
                        self._check_thread()
            except Exception:
                # The leases must still be extended.
                logger.exception("Unexpected error in the idempotency heartbeat, which continues")

    def _wait_for_due(self) -> bool:
        """Waits until a lease is due; returns False if there was none for a while."""
        while True:
            # Infinite while the set is read, so that a lease added meanwhile wakes the thread.
            self.wakes_at = FOREVER
            due, now = self.next_due, monotonic()
            if due <= now:
                return True
            self._expect(due)
            self.wakes_at = due
            try:
                self._wake.get(timeout=min(due - now, IDLE_SECONDS))
            except queue.Empty:
                if due == FOREVER:
                    return False

    def _expect(self, at: float) -> None:
        """Counts as late from a third of the shortest lease after `at` on."""
        self._expected_by = at + max(self.shortest / 3, LEAST_DELAY)

    def _extend(self, thread: threading.Thread) -> None:
        if due := self.take_due():  # else renewal was stopped meanwhile
            timeout = self.timeout
            self._expect(monotonic() + 2 * timeout)
            run_sync(self.extend(due, timeout, lambda: self.thread is thread))


class Heartbeat(Renewers[ThreadRenewer]):
    """The leases of this process.

    A forked child has none of its parent's threads and leases, so it starts with none.
    """

    def __init__(self) -> None:
        #: Called each time that a thread has died or is late.
        self.on_replaced: Callable[[], object] = lambda: None
        super().__init__(lambda: ThreadRenewer(lambda: self.on_replaced()))
        os.register_at_fork(after_in_child=self.reset)


#: The heartbeat of this process.
heartbeat = Heartbeat()
