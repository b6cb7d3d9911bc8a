"""The heartbeat: extends the leases of this process, by a daemon thread for each store.

The leases of an event loop are extended by `asyncio_heartbeat`, with the same requests.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events.repeats import Repeats, like_it
from celery_idempotent.events.report import log_extra
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.lease.lease import Lease
from celery_idempotent.printable import plural
from celery_idempotent.record import layout
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

#: Seconds, at least, before a thread counts as late, since a busy machine delays it.
LEAST_DELAY = 1.0
#: Seconds without a lease after which a thread ends.
IDLE_SECONDS = 60.0

#: The timeout of a request, as a part of the shortest lease: two may fail before that expires.
TIMEOUT_PART = 1 / 8

FOREVER = float("inf")


class Renewer:
    """The leases in one store, which any number of threads add and remove without a lock.

    A signal handler that raises could leave a lock locked, and no lease would be extended any
    more. Adding to a set, removing from it and copying it are atomic.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all leases, in a child that was forked."""
        self.held: set[Lease[RecordStore]] = set()
        #: Since the last reply.
        self._repeats = Repeats()

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

    async def extend(self, due: list[Lease[RecordStore]], is_current: Callable[[], bool]) -> None:
        """Extends the leases `due`, and applies the replies if `is_current` is true by then."""
        sent_at, timeout = monotonic(), self.shortest * TIMEOUT_PART
        try:
            replies = await due[0].store.extend([lease.extension for lease in due], timeout)
        except IdempotencyError as error:
            # The store is unavailable; the next request follows soon.
            if (number := self._repeats.left_out(None)) is not None:
                leases = plural(len(due), "lease")
                logger.warning("%s not extended: %s%s", leases, error, like_it(number))
            return
        self._repeats = Repeats()
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
            elif not _was_settled(lease, reply):
                try:
                    self.held.remove(lease)
                except KeyError:
                    continue  # renewal was stopped meanwhile
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


class ThreadRenewer(Renewer):
    """The leases in one store, and the thread that extends them.

    It starts with the first lease. A thread that has died, or does not return from a request, is
    replaced when the next lease is added or removed.

    Args:
        on_replaced: called if the thread has died or is late.
        on_expected: called with the time by which the leases expire unless the thread goes on.
    """

    def __init__(
        self,
        on_replaced: Callable[[], object],
        on_expected: Callable[[ThreadRenewer, float], object],
    ) -> None:
        super().__init__()
        self._on_replaced = on_replaced
        self._on_expected = on_expected

    def reset(self) -> None:
        """See `Renewer`."""
        super().reset()
        self.thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.wakes_at = FOREVER
        #: Seconds of `lease.clock` by which the thread finishes its current wait or request.
        self._expected_by = FOREVER

    def start_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `Renewer`."""
        self.held.add(lease)
        self._check_thread()
        if lease.due < self.wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease[RecordStore]) -> None:
        """See `Renewer`."""
        self.held.discard(lease)
        if self.held:
            self._check_thread()

    def _check_thread(self) -> None:
        """Starts a thread unless there is one that runs and is not late."""
        current, late = self.thread, monotonic() - self._expected_by
        if current is not None and current.is_alive() and late <= 0:
            return
        if current is not None:
            self._on_replaced()
            logger.error(
                "The idempotency heartbeat %s; another thread goes on with %s",
                f"is {late:.1f} s late" if current.is_alive() else "has died",
                plural(len(self.held), "lease"),
            )
        self._expected_by = FOREVER
        thread = threading.Thread(
            target=lambda: self._run(thread), name="idempotency-heartbeat", daemon=True
        )
        self.thread = thread
        thread.start()

    def _run(self, thread: threading.Thread) -> None:
        while self.thread is thread:  # else it was replaced
            try:
                if self._wait_for_due():
                    self._extend(thread)
                elif self.thread is thread:
                    # First, so that a lease that is added from now on starts another thread.
                    self.thread = None
                    if self.held:
                        self._check_thread()
            except Exception:
                # The leases must still be extended.
                logger.exception("Unexpected error in the idempotency heartbeat, which continues")

    def _wait_for_due(self) -> bool:
        """Waits until a lease is due; returns False if there was none for a while."""
        while True:
            # Infinite while the set is read, so that a lease added meanwhile wakes the thread.
            self.wakes_at = FOREVER
            due, now = self.next_due, monotonic()
            if due <= now:
                return True
            self._expect(due)
            self.wakes_at = due
            try:
                self._wake.get(timeout=min(due - now, IDLE_SECONDS))
            except queue.Empty:
                if due == FOREVER:
                    return False

    def _expect(self, at: float) -> None:
        """Counts as late from a third of the shortest lease after `at` on."""
        self._expected_by = at + max(self.shortest / 3, LEAST_DELAY)
        self._on_expected(self, at + self.shortest * 2 / 3)

    def _extend(self, thread: threading.Thread) -> None:
        if due := self.take_due():  # else renewal was stopped meanwhile
            self._expect(monotonic() + 2 * self.shortest * TIMEOUT_PART)
            run_sync(self.extend(due, lambda: self.thread is thread))


class Heartbeat(Renewers[ThreadRenewer]):
    """The leases of this process.

    A forked child has none of its parent's threads and leases, so it starts with none. Its renewers
    are those of its parent, emptied: a runtime keeps its renewer.
    """

    def __init__(self) -> None:
        #: Called each time that a thread has died or is late.
        self.on_replaced: Callable[[], object] = lambda: None
        #: Called with the time (seconds of `lease.clock`) at which a lease expires unless its
        #: thread goes on; infinite without a lease.
        self.on_expected: Callable[[float], object] = lambda _: None
        super().__init__(lambda: ThreadRenewer(lambda: self.on_replaced(), self._expect))
        self._expected: dict[int, float] = {}
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        for renewer in tuple(self._renewers.values()):
            renewer.reset()
        self._expected.clear()

    def _expect(self, renewer: ThreadRenewer, at: float) -> None:
        self._expected[id(renewer)] = at
        self.on_expected(min(tuple(self._expected.values())))


#: The heartbeat of this process.
heartbeat = Heartbeat()
