"""A heartbeat thread that is interrupted, dies or is stuck: leases are still extended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent.core.lease.heartbeat import Heartbeat
from celery_idempotent.core.store.record_store import RecordStore
from tests.flow.deliveries import PACKAGE, SignalAtLine
from tests.store import deployments
from tests.store.record_harness import Holder, RecordHarness, await_later_deadline, deadline, keys
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize(
    "site", deployments.params(deployments.PLAIN[0]), indirect=True
)

#: Where a signal may be delivered: the package, and Python's own modules for threads.
FILES = (PACKAGE, threading.__file__)


class SignalError(Exception):
    """Raised by a signal handler of the user."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def trigger(*_: Any) -> None:
        raise SignalError

    before = signal.signal(signal.SIGALRM, trigger)
    yield
    signal.signal(signal.SIGALRM, before)


def interrupt_at(at: int, call: Any, *args: Any) -> str:
    """Call it and raise at its `at`-th line; return that place, or nothing if there is none."""
    injected = SignalAtLine(at, signal.SIGALRM, FILES)
    # Python's own condition variables raise RuntimeError after the interruption.
    with contextlib.suppress(SignalError, RuntimeError), injected.armed():
        call(*args)
    return injected.where


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("method", ["start_renewal", "stop_renewal"])
@pytest.mark.exhaustive
def test_a_signal_at_any_line_does_not_stop_the_heartbeat(
    harness: RecordHarness, first: bool, method: str
) -> None:
    """The first lease starts the thread, which is most of the work of `start_renewal`."""
    at = 0
    while True:
        at += 1
        heart = Heartbeat()
        interrupted, other = (Holder(harness, key) for key in keys(2))
        if not first:
            heart.start_renewal(other.lease)
        if method == "stop_renewal":
            heart.start_renewal(interrupted.lease)
        where = interrupt_at(at, getattr(heart, method), interrupted.lease)

        heart.start_renewal(other.lease)
        heart.stop_renewal(interrupted.lease)
        try:
            await_later_deadline(harness, other.lease.key, than=deadline(harness, other.lease.key))
        except BaseException as error:
            error.add_note(f"interrupted at {where}")
            raise
        assert heart.held() == (other.lease,)
        heart.stop_renewal(other.lease)
        harness.client.flushall()
        if not where:
            break
    assert at > 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_replaced(
    harness: RecordHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heart = Heartbeat()
    replaced: list[bool] = []
    heart.on_replaced = lambda: replaced.append(True)
    first, second = (Holder(harness, key) for key in keys(2))
    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "extend", lambda *_: (_ for _ in ()).throw(SystemExit))
        heart.start_renewal(first.lease)
        thread = heart.renewer(harness.store).thread
        eventually(lambda: not thread.is_alive())
    assert not caplog.records

    heart.start_renewal(second.lease)

    for holder in (first, second):
        await_later_deadline(harness, holder.lease.key, than=deadline(harness, holder.lease.key))
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("ERROR", "The idempotency heartbeat has died; another thread goes on with 2 leases")
    ]
    assert replaced == [True]
    for holder in (first, second):
        heart.stop_renewal(holder.lease)


def test_a_thread_that_is_stuck_is_replaced(
    harness: RecordHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heart = Heartbeat()
    first, second = (Holder(harness, key, lease_ms=900) for key in keys(2))
    extend, free = RecordStore.extend, threading.Event()

    def stuck(*args: Any) -> Any:
        monkeypatch.undo()
        free.wait(30)
        return extend(*args)

    monkeypatch.setattr(RecordStore, "extend", stuck)
    heart.start_renewal(first.lease)
    eventually(lambda: not first.lease.trusted)  # the execution's `check()` raises

    def noticed() -> bool:
        heart.start_renewal(second.lease)
        heart.stop_renewal(second.lease)
        return bool(caplog.records)

    eventually(noticed)
    await_later_deadline(harness, first.lease.key, than=deadline(harness, first.lease.key))
    eventually(lambda: first.lease.trusted)
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert "s late; another thread goes on with" in record.message
    free.set()
    heart.stop_renewal(first.lease)
