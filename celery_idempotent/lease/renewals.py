"""The leases in each store: which are due, the request that extends them, and its replies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events.report import log_extra
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.record import layout
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

FOREVER = float("inf")


class Renewer:
    """The leases in one store, which any number of threads add and remove without a lock.

    A signal handler that raises could leave a lock locked, and no lease would be extended any
    more. Adding to a set, removing from it and copying it are atomic.
    """

    def __init__(self) -> None:
        self.held: set[Lease[RecordStore]] = set()

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extends `lease` from now on."""
        self.held.add(lease)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Stops extending it; the reply to a request that is being sent is ignored."""
        self.held.discard(lease)

    @property
    def next_due(self) -> float:
        """When the next one is due (seconds of `lease.clock`); infinite if there is none."""
        return min((lease.due for lease in tuple(self.held)), default=FOREVER)

    @property
    def shortest(self) -> float:
        """The length of the shortest lease in seconds; infinite if there is none."""
        return min((lease.seconds for lease in tuple(self.held)), default=FOREVER)

    def take_due(self) -> list[Lease[RecordStore]]:
        """Returns the leases that are due, or soon will be."""
        now = monotonic()
        due = [lease for lease in tuple(self.held) if lease.due_with_others <= now]
        for lease in due:
            # First, so that a lease whose request fails is not retried in a busy loop.
            lease.unanswered()
        return due

    @property
    def timeout(self) -> float:
        """With this timeout (seconds) two requests may fail before the shortest lease expires."""
        return self.shortest / 8

    async def extend(
        self, due: list[Lease[RecordStore]], timeout: float, is_current: Callable[[], bool]
    ) -> None:
        """Extends the leases `due`, and applies the replies if `is_current` is true by then."""
        sent_at = monotonic()
        try:
            replies = await due[0].store.extend([lease.extension for lease in due], timeout)
        except IdempotencyError as error:
            # The store is unavailable; the next request follows soon.
            logger.warning("%d leases could not be extended: %s", len(due), error)
            return
        for lease, reply in zip(due, replies, strict=True) if is_current() else ():
            if isinstance(reply, IdempotencyError):
                logger.warning(
                    "The lease of %s could not be extended: %s",
                    lease.key,
                    reply,
                    extra=log_extra(lease.key, token=lease.token),
                )
            elif reply.case == "ok":
                lease.renewed(sent_at)
            elif not _was_settled(lease, reply) and lease in self.held:
                self.held.discard(lease)
                lease.lost = True
                lease.on_lost(reply.raw)


def _was_settled(lease: Lease[RecordStore], reply: Reply) -> bool:
    """Whether the record has the lease's own outcome, stored while the request was sent."""
    try:
        return layout.read(reply.raw, "", "").token == lease.token
    except IdempotencyError:
        return False


RenewerT = TypeVar("RenewerT", bound=Renewer)


class Renewers(Generic[RenewerT]):
    """Extends leases from :meth:`start_renewal` to :meth:`stop_renewal`.

    Each store has a renewer of its own, since one that does not reply must not delay the others.
    """

    def __init__(self, make: Callable[[], RenewerT]) -> None:
        self._make = make
        self.reset()

    def reset(self) -> None:
        """Forgets all leases, in a child that was forked."""
        self._renewers: WeakKeyDictionary[RecordStore, RenewerT] = WeakKeyDictionary()

    def renewer(self, store: RecordStore) -> RenewerT:
        """Returns what extends the leases in `store`."""
        renewer = self._renewers.get(store)
        if renewer is None:
            renewer = self._renewers.setdefault(store, self._make())
        return renewer

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """Extends `lease` from now on."""
        self.renewer(lease.store).start_renewal(lease)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """Stops extending it; the reply to a request that is being sent is ignored."""
        self.renewer(lease.store).stop_renewal(lease)

    def held(self) -> tuple[Lease[RecordStore], ...]:
        """The leases of this process, or of this event loop."""
        # Another thread may add a store meanwhile, which an iteration would not survive.
        stores = [reference() for reference in self._renewers.keyrefs()]
        held = [self.renewer(store).held for store in stores if store is not None]
        return tuple(lease for leases in held for lease in tuple(leases))
