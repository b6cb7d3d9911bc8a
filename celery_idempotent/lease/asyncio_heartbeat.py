"""The heartbeat of an event loop: a timer, and a task for each request.

A timer does not keep the loop running, so there is nothing to stop after the last lease.
"""

from __future__ import annotations

import asyncio
import logging

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import Leases, by_store, log_renewal_failure
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.transport.per_loop import PerLoop

logger = logging.getLogger(__name__)


class AsyncioHeartbeat:
    """As :class:`Heartbeat`, for the leases of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leases: Leases[RecordStore] = Leases()
        self._timer: asyncio.TimerHandle | None = None
        self._request: asyncio.Task[None] | None = None

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extends `lease` from now on."""
        self._leases.held.add(lease)
        self._wake_at(lease.due)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Stops extending it; the reply to a request that is being sent is ignored."""
        self._leases.held.discard(lease)

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this loop."""
        return tuple(self._leases.held)

    def _wake_at(self, due: float) -> None:
        if self._request is not None:
            return  # it sets the timer when it ends
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
            self._request = self._loop.create_task(self._extend(due, timeout))
            self._request.add_done_callback(self._request_done)
        else:
            self._request_done()

    def _request_done(self, request: asyncio.Task[None] | None = None) -> None:
        self._request = None
        if request is not None and not request.cancelled() and (error := request.exception()):
            # The other leases must still be extended.
            logger.error(
                "Unexpected error in the idempotency heartbeat, which continues", exc_info=error
            )
        if self._leases.held:
            self._wake_at(self._leases.next_due)

    async def _extend(self, due: list[Lease[RecordStore]], timeout: float) -> None:
        for store, leases in by_store(due).items():
            sent_at = monotonic()
            try:
                replies = await store.extend([lease.extension for lease in leases], timeout)
            except IdempotencyError as error:
                log_renewal_failure(leases, error)
            else:
                self._leases.apply_replies(leases, replies, sent_at)


#: Returns the heartbeat of the running event loop.
asyncio_heartbeat = PerLoop(AsyncioHeartbeat).get
