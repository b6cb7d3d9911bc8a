"""The heartbeat: one daemon thread a process that extends all its leases."""

from __future__ import annotations

import logging
import os
import threading
from time import monotonic

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.held import Lease
from celery_idempotent.lease.leases import Leases, by_store, unheard
from celery_idempotent.store.records import RecordStore

logger = logging.getLogger(__name__)


class Heartbeat:
    """Keeps leases alive from :meth:`hold` to :meth:`let_go`.

    The thread starts with the first lease. A forked child has no threads and holds no leases of
    its parent, so it starts afresh.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._leases: Leases[RecordStore] = Leases()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def hold(self, lease: Lease[RecordStore]) -> None:
        """Extend `lease` from now on."""
        with self._changed:
            self._leases.held.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="idempotency-heartbeat", daemon=True
                )
                self._thread.start()
            elif lease.due < self._wakes_at:
                self._changed.notify()

    def let_go(self, lease: Lease[RecordStore]) -> None:
        """Extend it no longer; what a request under way still brings is not heard."""
        with self._changed:
            self._leases.held.discard(lease)

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this process."""
        with self._changed:
            return tuple(self._leases.held)

    def _run(self) -> None:
        while True:
            try:
                self._beat(*self._wait_for_due())
            except Exception:
                # Whatever it was, the other leases must not end of it.
                logger.exception("The idempotency heartbeat met an unexpected error and goes on")

    def _wait_for_due(self) -> tuple[list[Lease[RecordStore]], float]:
        with self._changed:
            while True:
                now = monotonic()
                self._wakes_at = self._leases.next_due
                if self._wakes_at <= now:
                    return self._leases.take_due()
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))

    def _beat(self, due: list[Lease[RecordStore]], patience: float) -> None:
        for store, leases in by_store(due).items():
            sent_at = monotonic()
            try:
                answers = store.extend([lease.extension for lease in leases], patience)
            except IdempotencyError as error:
                unheard(leases, error)
            else:
                self._leases.hear(leases, answers, sent_at)


#: The one of this process.
heartbeat = Heartbeat()
