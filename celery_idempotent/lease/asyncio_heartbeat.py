"""The heartbeat of an event loop: a timer for each store, and a task for each request.

A timer does not keep the loop running, so there is nothing to stop after the last lease.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakKeyDictionary

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.lease.renewals import Leases, log_renewal_failure
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.transport.per_loop import PerLoop

logger = logging.getLogger(__name__)


class AsyncioHeartbeat:
    """As :class:`Heartbeat`, for the leases of the running event loop."""

    def __init__(self) -> None:
        self._renewers: WeakKeyDictionary[RecordStore, _Renewer] = WeakKeyDictionary()

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extends `lease` from now on."""
        self._renewer(lease.store).start_renewal(lease)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Stops extending it; the reply to a request that is being sent is ignored."""
        self._renewer(lease.store).leases.held.discard(lease)

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this loop."""
        return tuple(lease for each in self._renewers.values() for lease in each.leases.held)

    def _renewer(self, store: RecordStore) -> _Renewer:
        renewer = self._renewers.get(store)
        if renewer is None:
            renewer = self._renewers[store] = _Renewer()
        return renewer


class _Renewer:
    """The leases in one store, its timer and its request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.leases: Leases[RecordStore] = Leases()
        self._timer: asyncio.TimerHandle | None = None
        self._request: asyncio.Task[None] | None = None

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `AsyncioHeartbeat`."""
        self.leases.held.add(lease)
        self._wake_at(lease.due)

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
        due, timeout = self.leases.take_due()
        if due:
            self._request = self._loop.create_task(self._extend(due, timeout))
            self._request.add_done_callback(self._request_done)
        else:
            self._request_done()

    def _request_done(self, request: asyncio.Task[None] | None = None) -> None:
        self._request = None
        if request is not None and not request.cancelled() and (error := request.exception()):
            # The leases must still be extended.
            logger.error(
                "Unexpected error in the idempotency heartbeat, which continues", exc_info=error
            )
        if self.leases.held:
            self._wake_at(self.leases.next_due)

    async def _extend(self, due: list[Lease[RecordStore]], timeout: float) -> None:
        sent_at = monotonic()
        try:
            replies = await due[0].store.extend([lease.extension for lease in due], timeout)
        except IdempotencyError as error:
            log_renewal_failure(due, error)
        else:
            self.leases.apply_replies(due, replies, sent_at)


#: Returns the heartbeat of the running event loop.
asyncio_heartbeat = PerLoop(AsyncioHeartbeat).get
