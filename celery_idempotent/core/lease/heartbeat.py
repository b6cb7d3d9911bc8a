"""The heartbeat: a daemon thread for each store extends the leases of this process.

`functions.asyncio_heartbeat` extends the leases of an event loop by the same requests.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.events.report import Repeats, like_it, log_apart, log_extra
from celery_idempotent.core.lease import Lease, ignore
from celery_idempotent.core.printable import plural
from celery_idempotent.core.record import layout
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import IdempotencyError

logger = logging.getLogger(__name__)

#: Minimum seconds before a thread counts as late: a busy machine delays it.
LEAST_DELAY = 1.0
#: Seconds without a lease after which a thread ends.
IDLE_SECONDS = 60.0

#: The timeout of a request, as a fraction of the shortest lease, and its minimum in seconds. A
#: request that an outage has swallowed must not delay the next: see `Lease.unanswered`.
TIMEOUT_PART, LEAST_TIMEOUT = 1 / 20, 0.1

FOREVER = float("inf")


def at_fork(**hooks: Callable[[], object]) -> None:
    """Registers `hooks` as os.register_at_fork does; Windows cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


class Renewer:
    """Extends the leases in one store, which any number of threads add and remove without a lock.

    A signal handler that raises could leave a lock locked, and no lease would be extended any
    more. Adding to a set, removing from it and copying it to a list are atomic, also without a GIL,
    where a tuple's iteration would fail.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drops all leases, in a forked child."""
        self.held: set[Lease] = set()
        #: Failed requests since the last reply.
        self._repeats = Repeats()

    def start_renewal(self, lease: Lease) -> None:
        """Extends `lease` from now on."""
        self.held.add(lease)

    def stop_renewal(self, lease: Lease) -> None:
        """Stops extending `lease`, and ignores the reply to a request that is being sent."""
        self.held.discard(lease)
        lease.on_lost = ignore

    @property
    def next_due(self) -> float:
        """The earliest due time of a lease (seconds of `lease_now`); infinite without leases."""
        return min((lease.due for lease in list(self.held)), default=FOREVER)

    @property
    def shortest(self) -> float:
        """The length of the shortest lease in seconds; infinite without leases."""
        return min((lease.seconds for lease in list(self.held)), default=FOREVER)

    @property
    def timeout(self) -> float:
        """How many seconds a request may take, resends included."""
        return max(self.shortest * TIMEOUT_PART, LEAST_TIMEOUT)

    def take_due(self) -> list[Lease]:
        """Returns the leases that are due now, or so soon that they join the same request."""
        now = lease_now()
        due = [lease for lease in list(self.held) if lease.due_with_others <= now]
        for lease in due:
            # Before the request: if that fails, it must not be retried in a busy loop.
            lease.unanswered()
        return due

    async def extend(self, due: list[Lease], is_current: Callable[[], bool]) -> None:
        """Extends the leases `due`, and applies the replies if `is_current` then returns true."""
        sent_at, extensions = lease_now(), [lease.extension for lease in due]
        try:
            replies = await due[0].store.extend(extensions, self.timeout)
        except IdempotencyError as error:
            # The store is unavailable. The next request follows soon.
            if (number := self._repeats.left_out(None)) is not None:
                values = plural(len(due), "lease"), error, like_it(number)
                log_apart(logger, logging.WARNING, "%s not extended: %s%s", *values)
            return
        if not any(isinstance(reply, IdempotencyError) for reply in replies):
            self._repeats = Repeats()
        for lease, reply in zip(due, replies, strict=True) if is_current() else ():
            if isinstance(reply, IdempotencyError):
                if (number := self._repeats.left_out(str(reply))) is not None:
                    log_apart(
                        *(logger, logging.WARNING),
                        "The lease of %s could not be extended: %s%s",
                        lease.key,
                        reply,
                        like_it(number),
                        extra=log_extra(lease.key, token=lease.token),
                    )
            elif reply.case == "ok":
                lease.renewed(sent_at)
            elif not _was_settled(lease, reply):
                try:
                    self.held.remove(lease)
                except KeyError:
                    continue  # another thread has stopped the renewal meanwhile
                lease.lost = True
                lease.on_lost(reply.raw)


def _was_settled(lease: Lease, reply: Reply) -> bool:
    """Whether the lease's execution was settled during the request."""
    try:
        return layout.read(reply.raw, "", "").token == lease.token
    except IdempotencyError:
        return False


RenewerT = TypeVar("RenewerT", bound=Renewer)


class Renewers(Generic[RenewerT]):
    """A renewer for each store: a store that does not reply must not delay the others."""

    def __init__(self, make: Callable[[], RenewerT]) -> None:
        self._make = make
        self._renewers: WeakKeyDictionary[RecordStore, RenewerT] = WeakKeyDictionary()

    def renewer(self, store: RecordStore) -> RenewerT:
        """Returns the renewer of the leases in `store`."""
        renewer = self._renewers.get(store)
        if renewer is None:
            renewer = self._renewers.setdefault(store, self._make())
        return renewer

    def renewers(self) -> list[RenewerT]:
        """Returns the renewer of each store."""
        # Not by iteration: another thread may add a store meanwhile.
        stores = [reference() for reference in self._renewers.keyrefs()]
        return [self.renewer(store) for store in stores if store is not None]

    def held(self) -> tuple[Lease, ...]:
        """Returns the leases of this process, or of this event loop."""
        return tuple(lease for renewer in self.renewers() for lease in list(renewer.held))


class ThreadRenewer(Renewer):
    """Extends the leases in one store by a thread, which the first lease starts.

    If the thread has died, or does not return from a request, another one replaces it when the next
    lease is added or removed.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__()
        self._heartbeat = heartbeat

    def reset(self) -> None:
        """See `Renewer`."""
        super().reset()
        self.thread: threading.Thread | None = None
        #: The same thread until it is alive.
        self._starting: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.wakes_at = FOREVER
        #: When the thread should have ended its current wait or request, and when a lease expires
        #: if it has not (seconds of `lease_now`).
        self._expected_by = self.expires_at = FOREVER

    def start_renewal(self, lease: Lease) -> None:
        """See `Renewer`."""
        self.held.add(lease)
        self._check_thread()
        if lease.due < self.wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease) -> None:
        """See `Renewer`."""
        self.held.discard(lease)
        lease.on_lost = ignore
        if self.held:
            self._check_thread()

    def _check_thread(self) -> None:
        """Starts a thread, unless one is running and not late."""
        current, late = self.thread, lease_now() - self._expected_by
        alive = current is not None and (current is self._starting or current.is_alive())
        if alive and late <= 0:
            return
        if current is not None:
            self._heartbeat.on_replaced()
            logger.error(
                "The idempotency heartbeat %s; another thread goes on with %s",
                f"is {late:.1f} s late" if alive else "has died",
                plural(len(self.held), "lease"),
            )
        self._expected_by = FOREVER
        thread = threading.Thread(
            target=lambda: self._run(thread), name="idempotency-heartbeat", daemon=True
        )
        try:
            self.thread = self._starting = thread
            thread.start()  # other threads and greenlets go on meanwhile
        finally:
            if self._starting is thread:
                self._starting = None

    def _run(self, thread: threading.Thread) -> None:
        while self.thread is thread:  # until it is replaced
            try:
                if self._wait_for_due():
                    self._extend(thread)
                elif self.thread is thread:
                    # Before the check: a lease that is added from now on starts another thread.
                    self.thread = None
                    if self.held:
                        self._check_thread()
            except Exception as error:
                # The leases must still be extended.
                text = "Unexpected error in the idempotency heartbeat, which continues"
                log_apart(logger, logging.ERROR, text, exc_info=error)

    def _wait_for_due(self) -> bool:
        """Waits until a lease is due; returns False after a while without leases."""
        while True:
            # Infinite while the set is read: a lease that is added meanwhile wakes the thread.
            self.wakes_at = FOREVER
            due, now = self.next_due, lease_now()
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
        """Expects the thread by `at`; it is late after another third of the shortest lease."""
        self._expected_by = at + max(self.shortest / 3, LEAST_DELAY)
        self.expires_at = at + self.shortest * 2 / 3
        renewers = self._heartbeat.renewers()
        self._heartbeat.on_expected(min((each.expires_at for each in renewers), default=FOREVER))

    def _extend(self, thread: threading.Thread) -> None:
        if due := self.take_due():  # empty if the renewal was stopped meanwhile
            self._expect(lease_now() + self.timeout)
            run_sync(self.extend(due, lambda: self.thread is thread))
            self._observe({lease.thread for lease in due if lease in self.held})

    def _observe(self, threads: set[int]) -> None:
        if threads:
            # Only an execution that has lasted for a third of its lease loads the module.
            from celery_idempotent.core.lease import stack

            held = self._heartbeat.held()
            for thread in threads:
                if leases := [lease for lease in held if lease.thread == thread]:
                    stack.observe(leases, self._heartbeat.on_observed)


class Heartbeat(Renewers[ThreadRenewer]):
    """Extends the leases of this process.

    A forked child has none of its parent's threads, and starts without leases. The renewers stay,
    because every runtime keeps the one of its store.
    """

    def __init__(self) -> None:
        #: Called each time that a thread has died or is late.
        self.on_replaced: Callable[[], object] = lambda: None
        #: Called with the time (seconds of `lease_now`) at which a lease expires unless its
        #: thread goes on; infinite without leases.
        self.on_expected: Callable[[float], object] = lambda _: None
        #: Called with the leases of a thread, and the stack of their body, after each request;
        #: None where it is read when an operator requests it.
        self.on_observed: Callable[[Sequence[Lease], list[str]], object] | None = None
        super().__init__(lambda: ThreadRenewer(self))
        at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        for renewer in self.renewers():
            renewer.reset()


#: The heartbeat of this process.
heartbeat = Heartbeat()
