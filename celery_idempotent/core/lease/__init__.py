"""Leases: the right to run until a deadline, extended by the heartbeat of a process or event loop.

The record holds the deadline, by the server's clock; before the deadline, no other execution
begins. The holder cannot read that clock. It uses its own (`lease_now`) and takes the pessimistic
view: a lease is *trusted until* the moment at which the request that granted it was **sent**, plus
the length of the lease, minus a margin for clocks that run at different rates. While a lease is
trusted, no other execution can have begun. Afterwards another one may have begun. Only the server
can detect that: it compares tokens and refuses a stale outcome.

If a host pauses a virtual machine and stops its clocks, the machine trusts an expired lease until
its next heartbeat. Then only the fencing token protects the downstream system.

Each store has a thread or timer of its own: a store that does not reply delays no other. The
heartbeat extends each lease after a third of its length, so two requests may fail before the lease
is no longer trusted. It extends the lease of one token, not of the execution that currently holds
the key.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import BuiltinFunctionType
from typing import Any
from weakref import ref

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.core.store.record_store import RecordStore

#: Fraction of a lease that is not trusted, since clocks run at different rates.
MARGIN = 0.05


def ignore(_: bytes) -> None:
    """Does nothing."""


#: An execution is logged once it has lasted for so many of its leases.
LONG = 10


class Lease:
    """The right to run one execution. The heartbeat extends it; the execution's thread reads it.

    Args:
        store: the store that has the record.
        extension: the record, the token and the length of the lease.
        sent_at: seconds of `lease_now`, read before the request that granted the lease was sent.
        on_lost: called once with the record, in the heartbeat's thread, when the server replies
            that the lease is lost. `ignore` replaces it when the renewal stops: `on_lost` refers to
            the grant, the grant to the lease, and only the garbage collector would free this cycle.
    """

    def __init__(
        self,
        store: RecordStore,
        extension: LeaseExtension,
        sent_at: float,
        on_lost: Callable[[bytes], None],
    ) -> None:
        self.store = store
        self.extension = extension
        #: The key of the record, and the fencing token.
        self.key, self.token = extension.key, extension.token
        self.on_lost = on_lost
        #: Whether the server has refused to extend it; the heartbeat sets it.
        self.lost = False
        #: Whether a check has stopped the body, which an extension after it does not undo.
        self.stopped = False
        #: Raised in the body by its next check, if a newer call has taken the key; `on_lost` sets
        #: it.
        self.error: Exception | None = None
        self.seconds = seconds = extension.lease_ms / 1000
        #: Until then, no other execution can have begun (seconds of `lease_now`).
        self.trusted_until = sent_at + seconds * (1 - MARGIN)
        #: From then on, the heartbeat extends the lease (seconds of `lease_now`).
        self.due = sent_at + seconds / 3
        #: When the execution began, and from when on the heartbeat logs that it still runs (seconds
        #: of `lease_now`).
        self.started_at, self.log_due = sent_at, sent_at + LONG * seconds
        #: Where the body runs: see `lease.stack`.
        self.thread, self.greenlet = get_ident(), _current_greenlet()

    @property
    def trusted(self) -> bool:
        """Whether no other execution can have begun, and the body may continue."""
        return not (self.lost or self.stopped) and lease_now() < self.trusted_until

    def renewed(self, sent_at: float) -> None:
        """Records that the server has extended the lease, by a request sent at `sent_at`."""
        self.trusted_until = sent_at + self.seconds * (1 - MARGIN)
        self.due = sent_at + self.seconds / 3

    def schedule_retry(self) -> None:
        """Makes the lease due again soon; called before a request, which may get no reply.

        After an outage longer than the lease, the first begin of a duplicate only marks the lease
        as expired, and the next may take over a tenth of the lease later (lua/begin.lua). A request
        must reach Redis before that.
        """
        self.due = lease_now() + min(1.0, self.seconds / 20)

    @property
    def due_with_others(self) -> float:
        """From then on, a request for another lease extends it too (seconds of `lease_now`)."""
        return self.due - self.seconds / 12


def _current_greenlet() -> Callable[[], Any]:
    """Returns a weak reference to the running greenlet; it returns None without a patched process.

    A strong reference to the greenlet of a real thread may crash Python once that thread has ended.
    """
    if isinstance(threading.get_ident, BuiltinFunctionType):  # neither gevent nor eventlet
        return lambda: None
    return ref(sys.modules["greenlet"].getcurrent())
