"""The heartbeat of an event loop: a timer, and a task for each beat.

A timer keeps no loop from ending, so nothing has to be stopped when the last lease is let go.
"""

from __future__ import annotations

import asyncio
import logging

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import Leases, by_store, log_renewal_failure
from celery_idempotent.store.async_record_store import AsyncRecordStore
from celery_idempotent.store.per_loop import PerLoop

logger = logging.getLogger(__name__)


class AsyncioHeartbeat:
    """As :class:`Heartbeat`, for the leases of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leases: Leases[AsyncRecordStore] = Leases()
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    def start_renewal(self, lease: Lease[AsyncRecordStore]) -> None:
        """Extend `lease` from now on."""
        self._leases.held.add(lease)
        self._wake_at(lease.due)

    def stop_renewal(self, lease: Lease[AsyncRecordStore]) -> None:
        """Extend it no longer; what a request under way still brings is not heard."""
        self._leases.held.discard(lease)

    def held(self) -> tuple[Lease[AsyncRecordStore], ...]:
        """The leases of this loop."""
        return tuple(self._leases.held)

    def _wake_at(self, due: float) -> None:
        if self._beating is not None:
            return  # it sets the timer when it is done
        when = self._loop.time() + due - monotonic()
        if self._timer is not None:
            if self._timer.when() <= when and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        due, timeout = self._leases.take_due()
        if due:
            self._beating = self._loop.create_task(self._beat(due, timeout))
            self._beating.add_done_callback(self._rest)
        else:
            self._rest()

    def _rest(self, beat: asyncio.Task[None] | None = None) -> None:
        self._beating = None
        if beat is not None and not beat.cancelled() and (error := beat.exception()):
            # Whatever it was, the other leases must not end of it.
            logger.error(
                "The idempotency heartbeat met an unexpected error and goes on", exc_info=error
            )
        if self._leases.held:
            self._wake_at(self._leases.next_due)

    async def _beat(self, due: list[Lease[AsyncRecordStore]], timeout: float) -> None:
        for store, leases in by_store(due).items():
            sent_at = monotonic()
            try:
                answers = await store.extend([lease.extension for lease in leases], timeout)
            except IdempotencyError as error:
                log_renewal_failure(leases, error)
            else:
                self._leases.apply_replies(leases, answers, sent_at)


#: Gives the one of the running event loop.
asyncio_heartbeat = PerLoop(AsyncioHeartbeat).get
