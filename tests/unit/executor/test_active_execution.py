"""What a begin has granted, when a signal handler raises or the body has threads."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.execution import Execution
from celery_idempotent.key.key import Key
from celery_idempotent.lease.lease import Lease
from celery_idempotent.record.layout import Begun
from celery_idempotent.settings import Settings


class Heartbeat:
    """Runtime whose heartbeat is interrupted by a signal handler when it first stops a renewal."""

    store = None
    execution = Execution

    def __init__(self) -> None:
        self.held: set[Lease[Any]] = set()
        self.interrupted = False

    def start_renewal(self, lease: Lease[Any]) -> None:
        self.held.add(lease)

    def stop_renewal(self, lease: Lease[Any]) -> None:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.held.discard(lease)


def granted(runtime: Any) -> ActiveExecution:
    call: Any = SimpleNamespace(
        sender=None, key=Key("shop.charge", "digest"), settings=Settings(lease=60.0), run=id
    )
    codec: Any = None
    return ActiveExecution(call, Begun(token=1, attempt=1, body=b""), runtime, codec, 0.0)


def test_a_renewal_that_a_signal_keeps_from_ending_ends_with_the_next_call() -> None:
    runtime = Heartbeat()
    active = granted(runtime)
    active.start(announce=False)
    with pytest.raises(KeyboardInterrupt):
        active.finish()

    if active.renewed:
        active.finish()

    assert not runtime.held


def first_steps_of_threads(active: ActiveExecution) -> list[Any]:
    """What each of four threads gets that ask at the same time."""
    barrier = threading.Barrier(4)
    steps: list[Any] = []

    def ask() -> None:
        barrier.wait()
        steps.append(active.steps)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steps


def test_threads_that_run_their_first_steps_at_once_share_the_steps() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            first, *others = first_steps_of_threads(granted(Heartbeat()))
            assert all(steps is first for steps in others)
    finally:
        sys.setswitchinterval(before)
