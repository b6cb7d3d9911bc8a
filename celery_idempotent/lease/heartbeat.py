"""The heartbeat: one daemon thread a process that extends all its leases."""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from time import monotonic

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.held import Lease
from celery_idempotent.record import layout
from celery_idempotent.store.records import RecordStore
from celery_idempotent.store.scripts import Reply

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
        self._leases: set[Lease] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def hold(self, lease: Lease) -> None:
        """Extend `lease` from now on."""
        with self._changed:
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="idempotency-heartbeat", daemon=True
                )
                self._thread.start()
            elif lease.due < self._wakes_at:
                self._changed.notify()

    def let_go(self, lease: Lease) -> None:
        """Extend it no longer; what a request under way still brings is not heard."""
        with self._changed:
            self._leases.discard(lease)

    def held(self) -> tuple[Lease, ...]:
        """The leases of this process."""
        with self._changed:
            return tuple(self._leases)

    def _run(self) -> None:
        while True:
            try:
                self._beat(*self._wait_for_due())
            except Exception:
                # Whatever it was, the other leases must not end of it.
                logger.exception("The idempotency heartbeat met an unexpected error and goes on")

    def _wait_for_due(self) -> tuple[list[Lease], float]:
        with self._changed:
            while True:
                now = monotonic()
                self._wakes_at = min((lease.due for lease in self._leases), default=float("inf"))
                if self._wakes_at <= now:
                    # Set first, so that a lease in trouble is not tried in a hot loop.
                    due = [lease for lease in self._leases if lease.due_with_others <= now]
                    for lease in due:
                        lease.unanswered()
                    # Two beats may fail before the shortest lease ends, whichever store is silent.
                    return due, min(lease.seconds for lease in self._leases) / 8
                self._changed.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))

    def _beat(self, due: list[Lease], patience: float) -> None:
        by_store: dict[RecordStore, list[Lease]] = defaultdict(list)
        for lease in due:
            by_store[lease.store].append(lease)
        for store, leases in by_store.items():
            sent_at = monotonic()
            try:
                answers = store.extend([lease.extension for lease in leases], patience)
            except IdempotencyError as error:
                logger.warning("%d leases could not be extended: %s", len(leases), error)
                continue
            for lease, answer in zip(leases, answers, strict=True):
                self._hear(lease, answer, sent_at)

    def _hear(self, lease: Lease, answer: Reply | IdempotencyError, sent_at: float) -> None:
        if isinstance(answer, IdempotencyError):
            logger.warning("The lease of %s could not be extended: %s", lease.key, answer)
        elif answer.case == "ok":
            lease.renewed(sent_at)
        elif not _settled_meanwhile(lease, answer):
            with self._changed:
                lost = lease in self._leases
                self._leases.discard(lease)
            if lost:
                lease.lost = True
                lease.on_lost()


def _settled_meanwhile(lease: Lease, answer: Reply) -> bool:
    """Whether the record bears the lease's own outcome, stored while this was under way."""
    try:
        return layout.read(answer.raw, "", "").token == lease.token
    except IdempotencyError:
        return False


#: The one of this process.
heartbeat = Heartbeat()
