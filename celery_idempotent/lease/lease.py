"""A lease in the hands of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from celery_idempotent.key.key import Key
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.store.commands import Extension

#: A store that blocks, or one for an event loop; each has a heartbeat of its kind.
StoreT = TypeVar("StoreT")

#: Part of a lease that is not trusted: room for clocks of different rates.
MARGIN = 0.05


class Lease(Generic[StoreT]):
    """The right to run one execution; renewed by the heartbeat, read by the execution's thread.

    Args:
        store: where the record is.
        extension: which record, under which token, for how long.
        sent_at: seconds of `lease.clock`, taken before the request that granted the lease was sent.
        on_lost: called once, in the heartbeat's thread, when the server says that it is lost.
    """

    def __init__(
        self,
        store: StoreT,
        extension: Extension,
        sent_at: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.store = store
        self.extension = extension
        self.on_lost = on_lost
        self.lost = False
        self.seconds = extension.lease_ms / 1000
        self.renewed(sent_at)

    @property
    def key(self) -> Key:
        """Whose record."""
        return self.extension.key

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.extension.token

    @property
    def trusted(self) -> bool:
        """Whether no rival can have begun."""
        return not self.lost and monotonic() < self.trusted_until

    def renewed(self, sent_at: float) -> None:
        """The server granted it again, on a request sent at `sent_at`, by `lease.clock`."""
        self.trusted_until = sent_at + self.seconds * (1 - MARGIN)
        self.due = sent_at + self.seconds / 3

    def unanswered(self) -> None:
        """The server did not answer: ask again soon, the lease is running out."""
        self.due = monotonic() + min(1.0, self.seconds / 10)

    @property
    def due_with_others(self) -> float:
        """From when on it joins a round trip made for another lease (monotonic seconds)."""
        return self.due - self.seconds / 12
