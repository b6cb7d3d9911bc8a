"""The heartbeat: a daemon thread for each store in which this process holds leases."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import Leases, log_renewal_failure
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync

logger = logging.getLogger(__name__)

#: Seconds, at least, before a thread counts as late, since a busy machine delays it.
LEAST_DELAY = 1.0
#: Seconds without a lease after which a thread ends.
IDLE_SECONDS = 60.0

_FOREVER = float("inf")


class Heartbeat:
    """Extends leases from :meth:`start_renewal` to :meth:`stop_renewal`.

    Each store has a thread of its own, since a store that does not reply must not delay the others.
    It starts with the first lease. A forked child has none of its parent's threads and leases, so
    it starts with an empty set. A thread that has died, or does not return from a request, is
    replaced when the next lease of its store is added or removed.

    There is no lock, because a signal handler that raises could leave it locked.
    """

    def __init__(self) -> None:
        #: Called each time that a thread has died or is late.
        self.on_replaced: Callable[[], object] = lambda: None
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._renewers: WeakKeyDictionary[RecordStore, Renewer] = WeakKeyDictionary()

    def renewer(self, store: RecordStore) -> Renewer:
        """Returns what extends the leases in `store`."""
        renewer = self._renewers.get(store)
        if renewer is None:
            renewer = self._renewers.setdefault(store, Renewer(lambda: self.on_replaced()))
        return renewer

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extends `lease` from now on."""
        self.renewer(lease.store).start_renewal(lease)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Stops extending it; the reply to a request that is being sent is ignored."""
        self.renewer(lease.store).stop_renewal(lease)

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this process."""
        # Another thread may add a store meanwhile, which an iteration would not survive.
        stores = [reference() for reference in self._renewers.keyrefs()]
        held = [self.renewer(store).leases.held for store in stores if store is not None]
        return tuple(lease for leases in held for lease in tuple(leases))


class Renewer:
    """The thread that extends the leases in one store, and those leases.

    Args:
        on_replaced: called if the thread has died or is late.
    """

    def __init__(self, on_replaced: Callable[[], object]) -> None:
        self._on_replaced = on_replaced
        self.leases: Leases[RecordStore] = Leases()
        self.thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.wakes_at = _FOREVER
        #: Seconds of `lease.clock` by which the thread finishes its current wait or request.
        self._expected_by = _FOREVER

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `Heartbeat`."""
        self.leases.held.add(lease)
        self._check_thread()
        if lease.due < self.wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `Heartbeat`."""
        self.leases.held.discard(lease)
        if self.leases.held:
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
                len(self.leases.held),
            )
        self._expected_by = _FOREVER
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
                    if self.leases.held:
                        self._check_thread()
            except Exception:
                # The leases must still be extended.
                logger.exception("Unexpected error in the idempotency heartbeat, which continues")

    def _wait_for_due(self) -> bool:
        """Waits until a lease is due; returns False if there was none for a while."""
        while True:
            # Infinite while the set is read, so that a lease added meanwhile wakes the thread.
            self.wakes_at = _FOREVER
            due, now = self.leases.next_due, monotonic()
            if due <= now:
                return True
            self._expect(due)
            self.wakes_at = due
            try:
                self._wake.get(timeout=min(due - now, IDLE_SECONDS))
            except queue.Empty:
                if due == _FOREVER:
                    return False

    def _expect(self, at: float) -> None:
        """Counts as late from a third of the shortest lease after `at` on."""
        held = tuple(self.leases.held)
        shortest = min((lease.seconds for lease in held), default=_FOREVER)
        self._expected_by = at + max(shortest / 3, LEAST_DELAY)

    def _extend(self, thread: threading.Thread) -> None:
        due, timeout = self.leases.take_due()
        if not due:
            return  # renewal was stopped meanwhile
        sent_at = monotonic()
        self._expect(sent_at + 2 * timeout)
        try:
            replies = run_sync(due[0].store.extend([lease.extension for lease in due], timeout))
        except IdempotencyError as error:
            log_renewal_failure(due, error)
        else:
            if self.thread is thread:
                self.leases.apply_replies(due, replies, sent_at)


#: The heartbeat of this process.
heartbeat = Heartbeat()
