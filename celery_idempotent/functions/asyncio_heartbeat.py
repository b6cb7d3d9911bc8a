"""The heartbeat of an event loop: a timer for each store, and a task for each request.

A timer does not keep the loop running, so nothing has to be stopped after the last lease.
"""

from __future__ import annotations

import asyncio
import logging

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.lease.heartbeat import Renewer, Renewers
from celery_idempotent.core.store.transport.per_loop import PerLoop

logger = logging.getLogger(__name__)


class TimerRenewer(Renewer):
    """Extends the leases in one store by a timer, one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        #: Sends the next request; None while a request is under way, and without leases.
        self._timer: asyncio.TimerHandle | None = None
        #: The request that is under way; None between two requests.
        self._request: asyncio.Task[None] | None = None

    def start_renewal(self, lease: Lease) -> None:
        """See `Renewer`."""
        super().start_renewal(lease)
        self._wake_at(lease.due)

    def _wake_at(self, due: float) -> None:
        if self._request is not None:
            return  # the request sets the timer when it ends
        when = self._loop.time() + due - lease_now()
        if self._timer is not None:
            if self._timer.when() <= when and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if due := self.take_due():
            self._request = self._loop.create_task(self.extend(due, lambda: True))
            self._request.add_done_callback(self._request_done)
        else:
            self._request_done()

    def _request_done(self, request: asyncio.Task[None] | None = None) -> None:
        self._request = None
        if request is not None and not request.cancelled() and (error := request.exception()):
            # It must not end the heartbeat, because the leases would expire.
            logger.error(
                "Unexpected error in the idempotency heartbeat, which continues", exc_info=error
            )
        if self.leases:
            self._wake_at(self.next_due)


#: Returns the renewers of the running event loop.
asyncio_heartbeat = PerLoop(lambda: Renewers(TimerRenewer)).get
