"""What threads share without a lock: a build without a GIL runs them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

from celery_idempotent.core.lease import Lease
from celery_idempotent.core.lease.heartbeat import Renewer
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.transport.server import ServerTransport

THREADS = 3


@contextmanager
def meanwhile(function: Callable[[int], object]) -> Iterator[None]:
    """Calls `function` in several threads, with the thread's number, again and again."""
    ended = threading.Event()

    def repeat(number: int) -> None:
        while not ended.is_set():
            function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(repeat, number) for number in range(THREADS)]
        try:
            yield
        finally:
            ended.set()
    for each in running:
        each.result()


def test_leases_are_read_while_threads_add_and_remove_them() -> None:
    renewer = Renewer()
    times = {"due": 1.0, "due_with_others": float("inf"), "seconds": 60.0}
    leases = [cast("Lease", SimpleLease(**times)) for _ in range(200)]
    renewer.leases.update(leases[THREADS:])

    def add_and_remove(number: int) -> None:
        renewer.start_renewal(leases[number])
        renewer.stop_renewal(leases[number])

    with meanwhile(add_and_remove):
        for _ in range(1000):
            assert renewer.next_due >= 1.0
            assert renewer.shortest >= 60.0
            assert not renewer.take_due()


class SimpleLease(SimpleNamespace):
    """The times of a lease."""

    __hash__ = object.__hash__


def test_idle_connections_are_closed_by_threads_that_lost_theirs() -> None:
    transport = ServerTransport(StoreConfig(url="redis://"))
    pool = transport._pool.get()
    lost = SimpleNamespace(disconnect=lambda nowait: None)

    def fail(number: int) -> None:
        pool.idle.append((lost, 0))
        run_sync(transport.close_idle())

    with meanwhile(fail):
        for _ in range(3000):
            run_sync(transport.close_idle())
