"""The heartbeat: a daemon thread for each store extends the leases of this process.

`core.flow.thread` adds a lease before the body runs and removes it when the body ends. On an event
loop, `functions.asyncio_heartbeat` does the same with a task for each store.
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

    With a lock, a signal handler that raises could leave it locked, and no lease would be extended
    any more. Adding to a set, removing from it and ``list(set)`` are atomic, also without a GIL;
    ``tuple(set)`` is not.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drops all leases, in a forked child."""
        self.leases: set[Lease] = set()
        #: Limits the log of failed requests; a new one after each reply without an error.
        self._repeats = Repeats()

    def start_renewal(self, lease: Lease) -> None:
        """Extends `lease` from now on."""
        self.leases.add(lease)

    def stop_renewal(self, lease: Lease) -> None:
        """Stops extending `lease`, and ignores the reply to a request that is being sent."""
        self.leases.discard(lease)
        lease.on_lost = ignore

    @property
    def next_due(self) -> float:
        """The earliest due time of a lease (seconds of `lease_now`); infinite without leases."""
        return min((lease.due for lease in list(self.leases)), default=FOREVER)

    @property
    def shortest(self) -> float:
        """The length of the shortest lease in seconds; infinite without leases."""
        return min((lease.seconds for lease in list(self.leases)), default=FOREVER)

    @property
    def timeout(self) -> float:
        """How many seconds a request may take, resends included."""
        return max(self.shortest * TIMEOUT_PART, LEAST_TIMEOUT)

    def take_due(self) -> list[Lease]:
        """Returns the leases that are due now, or so soon that they join the same request."""
        now = lease_now()
        due = [lease for lease in list(self.leases) if lease.due_with_others <= now]
        for lease in due:
            # Before the request is sent: if it fails, the lease must not be due again at once, or
            # the thread would send requests in a busy loop.
            lease.schedule_retry()
        return due

    async def extend(self, due: list[Lease], is_current: Callable[[], bool]) -> None:
        """Extends the leases `due` by one request, and applies the replies.

        Args:
            is_current: called after the replies; false if another thread or task has replaced the
                caller meanwhile, which then ignores the replies.
        """
        sent_at, extensions = lease_now(), [lease.extension for lease in due]
        try:
            replies = await due[0].store.extend(extensions, self.timeout)
        except IdempotencyError as error:
            # The store is unavailable. `schedule_retry` has made the leases due again soon.
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
                    self.leases.remove(lease)
                except KeyError:
                    continue  # another thread has stopped the renewal meanwhile
                lease.lost = True
                lease.on_lost(reply.raw)


def _was_settled(lease: Lease, reply: Reply) -> bool:
    """Whether the lease was refused because its own execution has ended, not lost it.

    The execution may store its outcome while the request is being sent.
    """
    try:
        return layout.read(reply.raw, "", "").token == lease.token
    except IdempotencyError:
        return False


RenewerT = TypeVar("RenewerT", bound=Renewer)


class Renewers(Generic[RenewerT]):
    """The renewers of a process or an event loop, one for each store.

    A store that does not reply must not delay the others.
    """

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
        # `keyrefs` returns a list. Iterating over the dictionary would fail if another thread adds
        # a store meanwhile.
        stores = [reference() for reference in self._renewers.keyrefs()]
        return [self.renewer(store) for store in stores if store is not None]

    def leases(self) -> tuple[Lease, ...]:
        """Returns the leases of this process, or of this event loop, in all stores."""
        return tuple(lease for renewer in self.renewers() for lease in list(renewer.leases))


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
        #: The thread that extends the leases; None if there is none, or it is about to end.
        self.thread: threading.Thread | None = None
        #: The same thread while `_check_thread` starts it, when ``is_alive()`` is still false.
        self._starting: threading.Thread | None = None
        #: The thread waits for an item of this queue, or until `wakes_at`; any item wakes it.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        #: When the thread, which waits, will check for due leases (seconds of `lease_now`).
        self.wakes_at = FOREVER
        #: When the thread should have ended its current wait or request, and when the first lease
        #: expires if it has not (seconds of `lease_now`). `_expect` sets both.
        self._expected_by = self.expires_at = FOREVER

    def start_renewal(self, lease: Lease) -> None:
        """See `Renewer`."""
        self.leases.add(lease)
        self._check_thread()
        if lease.due < self.wakes_at:
            self._wake.put(None)

    def stop_renewal(self, lease: Lease) -> None:
        """See `Renewer`."""
        self.leases.discard(lease)
        lease.on_lost = ignore
        if self.leases:
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
                plural(len(self.leases), "lease"),
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
                    # First `thread`, then the check: a lease that another thread adds after the
                    # check finds no thread and starts one, so no lease is without a thread.
                    self.thread = None
                    if self.leases:
                        self._check_thread()
            except Exception as error:
                # The thread must go on, because without it the leases would expire.
                text = "Unexpected error in the idempotency heartbeat, which continues"
                log_apart(logger, logging.ERROR, text, exc_info=error)

    def _wait_for_due(self) -> bool:
        """Waits until a lease is due; returns False after a while without leases."""
        while True:
            # Infinite while the leases are read, so that `start_renewal` wakes this thread for a
            # lease that is added meanwhile.
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

    def _expect(self, ends_at: float) -> None:
        """Notes that the thread should be done by `ends_at` (seconds of `lease_now`).

        A third of the shortest lease later, `_check_thread` replaces it.
        """
        self._expected_by = ends_at + max(self.shortest / 3, LEAST_DELAY)
        self.expires_at = ends_at + self.shortest * 2 / 3
        renewers = self._heartbeat.renewers()
        self._heartbeat.on_expected(min((each.expires_at for each in renewers), default=FOREVER))

    def _extend(self, thread: threading.Thread) -> None:
        if due := self.take_due():  # empty if the renewal was stopped meanwhile
            self._expect(lease_now() + self.timeout)
            run_sync(self.extend(due, lambda: self.thread is thread))
            self._observe({lease.thread for lease in due if lease in self.leases})

    def _observe(self, threads: set[int]) -> None:
        """Reads where the bodies are that run in these threads (by ``get_ident``)."""
        if threads:
            # Imported here: most executions end before their lease is extended.
            from celery_idempotent.core.lease import stack

            all_leases = self._heartbeat.leases()
            for thread in threads:
                if leases := [lease for lease in all_leases if lease.thread == thread]:
                    stack.observe(leases, self._heartbeat.on_observed)


class Heartbeat(Renewers[ThreadRenewer]):
    """Extends the leases of this process.

    A forked child has none of its parent's threads, and starts without leases. Its renewers are
    reset rather than replaced, because each runtime refers to the one of its store.
    """

    def __init__(self) -> None:
        #: Called when a thread has died or is late; `contrib.prometheus` counts it.
        self.on_replaced: Callable[[], object] = lambda: None
        #: Called with the time (seconds of `lease_now`) at which a lease expires unless its
        #: thread goes on; infinite without leases. `SharedCounters` sets it in a pool process, so
        #: that the worker's main process can find a frozen one.
        self.on_expected: Callable[[float], object] = lambda _: None
        #: Called with the leases of a thread, and the stack of their body, after each request.
        #: `SharedCounters` sets it in a pool process; elsewhere it is None, and the stack is only
        #: read when an operator asks for it.
        self.on_observed: Callable[[Sequence[Lease], list[str]], object] | None = None
        super().__init__(lambda: ThreadRenewer(self))
        at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        for renewer in self.renewers():
            renewer.reset()


#: The heartbeat of this process.
heartbeat = Heartbeat()
