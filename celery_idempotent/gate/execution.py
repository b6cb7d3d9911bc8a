"""An execution, as the code that runs sees it."""

from __future__ import annotations

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.lease.held import Lease


class Execution:
    """One run under the gate: ``self.idempotency`` in a bound task."""

    __slots__ = ("_lease", "attempt", "key", "token")

    def __init__(self, key: str, token: int, attempt: int, lease: Lease | None) -> None:
        #: ``task:digest``: the same for every duplicate, fit as the key of a system downstream.
        self.key = key
        #: Fencing token: hand it to the system downstream, and let that refuse smaller ones.
        self.token = token
        #: 1 for the first execution, one more for each that died before this one.
        self.attempt = attempt
        self._lease = lease

    @property
    def recovered(self) -> bool:
        """Whether this takes over from an execution that died: look what it left behind."""
        return self.attempt > 1

    @property
    def protected(self) -> bool:
        """False where nothing keeps a duplicate out: a plain call, an ungated one, or a store
        that could not be asked under ``on_store_error="run"``.
        """
        return self._lease is not None

    def check(self) -> None:
        """Make sure, from memory and without a round trip, that nobody else can be running.

        Raises:
            LeaseLostError: if another execution has taken over, or may have by now.
        """
        if self._lease is None or self._lease.trusted:
            return
        if self._lease.lost:
            raise LeaseLostError(f"{self.key}: another execution has taken over")
        raise LeaseLostError(f"{self.key}: the lease could not be extended in time")


def unprotected(key: str = "") -> Execution:
    """The execution of a call that did not pass the gate: it runs, and nothing stands behind it."""
    return Execution(key, token=0, attempt=1, lease=None)
