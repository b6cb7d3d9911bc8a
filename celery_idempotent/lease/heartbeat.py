"""The heartbeat: one daemon thread a process that extends all its leases."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import Leases, by_store, log_renewal_failure
from celery_idempotent.store.record_store import RecordStore

logger = logging.getLogger(__name__)

#: Seconds, at least, before the thread counts as late: a busy machine is no fault of its own.
LEAST_DELAY = 1.0

_FOREVER = float("inf")


class Heartbeat:
    """Keeps leases alive from :meth:`hold` to :meth:`let_go`.

    The thread starts with the first lease. A forked child has no threads and holds no leases of
    its parent, so it starts afresh. A thread that has died, or is stuck, is replaced by the next
    lease that begins or ends.

    There is no lock: a signal whose handler raises could leave it locked for ever.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._leases: Leases[RecordStore] = Leases()
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakes_at = _FOREVER
        #: When the thread will have come round, if all is well.
        self._expected_by = _FOREVER

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extend `lease` from now on."""
        self._leases.held.add(lease)
        self._ensure_thread()
        if lease.due < self._wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extend it no longer; what a request under way still brings is not heard."""
        self._leases.held.discard(lease)
        if self._leases.held:
            self._ensure_thread()

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this process."""
        return tuple(self._leases.held)

    def _ensure_thread(self) -> None:
        before, late = self._thread, monotonic() - self._expected_by
        if before is not None and before.is_alive() and late <= 0:
            return
        if before is not None:
            logger.error(
                "The idempotency heartbeat %s; another thread goes on with %d leases",
                f"is {late:.1f} s late" if before.is_alive() else "has died",
                len(self._leases.held),
            )
        self._expected_by = _FOREVER
        thread = threading.Thread(
            target=lambda: self._run(thread), name="idempotency-heartbeat", daemon=True
        )
        self._thread = thread
        thread.start()

    def _run(self, thread: threading.Thread) -> None:
        while self._thread is thread:  # else another has taken over
            try:
                self._beat(*self._wait_for_due(), thread)
            except Exception:
                # Whatever it was, the other leases must not end of it.
                logger.exception("The idempotency heartbeat met an unexpected error and goes on")

    def _wait_for_due(self) -> tuple[list[Lease[RecordStore]], float]:
        while True:
            # A lease that comes while the others are looked at must not be missed.
            self._wakes_at = _FOREVER
            due, now = self._leases.next_due, monotonic()
            if due <= now:
                return self._leases.take_due()
            self._expect(due)
            self._wakes_at = due
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=min(due - now, threading.TIMEOUT_MAX))

    def _expect(self, at: float) -> None:
        """Count as late a third of the shortest lease after `at`: two thirds are over by then."""
        shortest = min((lease.seconds for lease in self.held()), default=_FOREVER)
        self._expected_by = at + max(shortest / 3, LEAST_DELAY)

    def _beat(
        self, due: list[Lease[RecordStore]], timeout: float, thread: threading.Thread
    ) -> None:
        for store, leases in by_store(due).items():
            sent_at = monotonic()
            self._expect(sent_at + 2 * timeout)
            try:
                answers = store.extend([lease.extension for lease in leases], timeout)
            except IdempotencyError as error:
                log_renewal_failure(leases, error)
            else:
                if self._thread is not thread:
                    return
                self._leases.apply_replies(leases, answers, sent_at)


#: The one of this process.
heartbeat = Heartbeat()
