"""The leases that one heartbeat keeps alive: which are due, and what each answer means."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease, StoreT
from celery_idempotent.record import layout
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

Answer = Reply | IdempotencyError


class Leases(Generic[StoreT]):
    """A set of leases, for any number of threads: none of them waits for another.

    A lock could be left locked by a signal whose handler raises, and then no lease would be
    extended any more. Adding to a set, taking from it and copying it are atomic by themselves.
    """

    def __init__(self) -> None:
        #: What a request under way still brings to a lease that is no longer here is not heard.
        self.held: set[Lease[StoreT]] = set()

    @property
    def next_due(self) -> float:
        """When the next one is due (monotonic seconds); infinite if there is none."""
        return min((lease.due for lease in tuple(self.held)), default=float("inf"))

    def take_due(self) -> tuple[list[Lease[StoreT]], float]:
        """Those that are due, or will be soon; and how long to wait for an answer (seconds).

        Two beats may fail before the shortest lease ends, whichever store is silent.
        """
        now, held = monotonic(), tuple(self.held)
        due = [lease for lease in held if lease.due_with_others <= now]
        for lease in due:
            # First, so that a lease in trouble is not tried in a hot loop.
            lease.unanswered()
        return due, min((lease.seconds for lease in held), default=0.0) / 8

    def apply_replies(
        self, due: Sequence[Lease[StoreT]], answers: Iterable[Answer], sent_at: float
    ) -> None:
        """The store's answers to a request sent at `sent_at` (monotonic seconds)."""
        for lease, answer in zip(due, answers, strict=True):
            if isinstance(answer, IdempotencyError):
                logger.warning("The lease of %s could not be extended: %s", lease.key, answer)
            elif answer.case == "ok":
                lease.renewed(sent_at)
            elif not _settled_meanwhile(lease, answer):
                self._lost(lease)

    def _lost(self, lease: Lease[StoreT]) -> None:
        try:
            self.held.remove(lease)
        except KeyError:
            return  # let go meanwhile
        lease.lost = True
        lease.on_lost()


def by_store(leases: Iterable[Lease[StoreT]]) -> dict[StoreT, list[Lease[StoreT]]]:
    """`leases` in groups that one round trip can extend."""
    groups: dict[StoreT, list[Lease[StoreT]]] = defaultdict(list)
    for lease in leases:
        groups[lease.store].append(lease)
    return groups


def log_renewal_failure(due: Sequence[Lease[StoreT]], error: IdempotencyError) -> None:
    """The store did not answer at all; the next beat asks again."""
    logger.warning("%d leases could not be extended: %s", len(due), error)


def _settled_meanwhile(lease: Lease[StoreT], answer: Reply) -> bool:
    """Whether the record bears the lease's own outcome, stored while this was under way."""
    try:
        return layout.read(answer.raw, "", "").token == lease.token
    except IdempotencyError:
        return False
