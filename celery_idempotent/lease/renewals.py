"""The leases in one store: which are due, and what the replies mean."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Generic

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events.report import log_extra
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease, StoreT
from celery_idempotent.record import layout
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)


class Leases(Generic[StoreT]):
    """A set of leases that any number of threads use without a lock.

    A signal handler that raises could leave a lock locked, and no lease would be extended any
    more. Adding to a set, removing from it and copying it are atomic.
    """

    def __init__(self) -> None:
        #: A reply for a lease that is not in the set any more is ignored.
        self.held: set[Lease[StoreT]] = set()

    @property
    def next_due(self) -> float:
        """When the next one is due (seconds of `lease.clock`); infinite if there is none."""
        return min((lease.due for lease in tuple(self.held)), default=float("inf"))

    def take_due(self) -> tuple[list[Lease[StoreT]], float]:
        """The leases that are due, or soon will be; and the timeout of the request (seconds).

        With that timeout two requests may fail before the shortest lease expires.
        """
        now, held = monotonic(), tuple(self.held)
        due = [lease for lease in held if lease.due_with_others <= now]
        for lease in due:
            # First, so that a lease whose request fails is not retried in a busy loop.
            lease.unanswered()
        return due, min((lease.seconds for lease in held), default=0.0) / 8

    def apply_replies(
        self,
        due: Sequence[Lease[StoreT]],
        replies: Iterable[Reply | IdempotencyError],
        sent_at: float,
    ) -> None:
        """Applies the replies to a request sent at `sent_at` (seconds of `lease.clock`)."""
        for lease, reply in zip(due, replies, strict=True):
            if isinstance(reply, IdempotencyError):
                logger.warning(
                    "The lease of %s could not be extended: %s",
                    lease.key,
                    reply,
                    extra=log_extra(lease.key, token=lease.token),
                )
            elif reply.case == "ok":
                lease.renewed(sent_at)
            elif not _was_settled(lease, reply):
                self._report_lost(lease, reply.raw)

    def _report_lost(self, lease: Lease[StoreT], raw: bytes) -> None:
        try:
            self.held.remove(lease)
        except KeyError:
            return  # renewal was stopped meanwhile
        lease.lost = True
        lease.on_lost(raw)


def log_renewal_failure(due: Sequence[Lease[StoreT]], error: IdempotencyError) -> None:
    """Logs that the store is unavailable; the next request follows soon."""
    logger.warning("%d leases could not be extended: %s", len(due), error)


def _was_settled(lease: Lease[StoreT], reply: Reply) -> bool:
    """Whether the record has the lease's own outcome, stored while the request was sent."""
    try:
        return layout.read(reply.raw, "", "").token == lease.token
    except IdempotencyError:
        return False
