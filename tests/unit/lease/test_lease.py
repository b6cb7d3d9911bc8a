"""How long a lease is trusted, by the clock of its holder."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import cast

import greenlet
import pytest

from celery_idempotent.core import lease
from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.flow.execution import Execution, Protection, unprotected
from celery_idempotent.core.key import Key
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.errors import LeaseLostError
from tests.unit.conftest import Clock

NOBODY = cast("RecordStore", None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease, "lease_now", clock)
    return clock


def lease_of(seconds: float, sent_at: float) -> Lease:
    extension = LeaseExtension(Key("shop.charge", "digest"), 17, int(seconds * 1000), 1000)
    return Lease(NOBODY, extension, sent_at, lambda raw: None)


def execution_of(lease: Lease, attempt: int = 1) -> Execution:
    return Execution("k", 17, attempt, cast("Protection", SimpleNamespace(lease=lease)))


def test_the_greenlet_of_a_thread_is_not_kept() -> None:
    """A reference to it after the end of the thread crashes Python in a garbage collection."""
    main_greenlet = greenlet.getcurrent()
    references = sys.getrefcount(main_greenlet)
    held = lease_of(60, sent_at=0)
    assert sys.getrefcount(main_greenlet) == references
    assert held.greenlet() is None


class TestTrust:
    def test_lasts_a_lease_from_the_sending_but_for_a_margin(self, clock: Clock) -> None:
        sent_at = clock()
        clock.now += 50
        lease = lease_of(60, sent_at)

        clock.now += 6.9
        assert lease.trusted
        clock.now += 0.2
        assert not lease.trusted

    def test_comes_back_with_a_renewal_unless_the_lease_is_lost(self, clock: Clock) -> None:
        lease = lease_of(60, sent_at=clock())
        clock.now += 61
        lease.renewed(clock())
        assert lease.trusted

        lease.lost = True
        lease.renewed(clock())
        assert not lease.trusted


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no such clock here")
def test_the_clock_goes_on_while_the_machine_is_suspended() -> None:
    """A test cannot suspend the machine; Linux documents this for the clock."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = lease_now()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)

    assert before <= now <= after


class TestDue:
    def test_after_a_third_of_the_lease(self, clock: Clock) -> None:
        lease = lease_of(60, sent_at=clock())

        assert lease.due - clock() == pytest.approx(20)
        assert lease.due_with_others - clock() == pytest.approx(15)
        assert lease.due + 20 < lease.trusted_until, "two can fail before trust ends"

    @pytest.mark.parametrize(("seconds", "again"), [(60, 1.0), (3, 0.15)])
    def test_again_soon_without_an_answer(self, seconds: float, again: float, clock: Clock) -> None:
        lease = lease_of(seconds, sent_at=clock())
        clock.now += seconds / 3

        lease.schedule_retry()

        assert lease.due - clock() == pytest.approx(again)


class TestCheck:
    def test_passes_while_the_lease_is_trusted(self, clock: Clock) -> None:
        lease = lease_of(60, clock())
        execution_of(lease).check()

        assert not execution_of(lease).recovered
        assert execution_of(lease, attempt=2).recovered
        assert execution_of(lease, attempt=2).protected

    @pytest.mark.parametrize(
        ("seconds", "lost", "reason"),
        [
            (60, False, "k: the lease could not be extended in time"),
            (0, True, "k: another execution has taken over"),
        ],
        ids=["ran out", "taken over"],
    )
    def test_fails(self, clock: Clock, seconds: float, lost: bool, reason: str) -> None:
        lease = lease_of(60, clock())
        lease.lost = lost
        clock.now += seconds

        with pytest.raises(LeaseLostError, match=reason):
            execution_of(lease).check()

    def test_passes_without_protection(self) -> None:
        execution = unprotected("k")

        execution.check()

        assert not execution.protected
        assert not execution.recovered
        assert execution.step("name", lambda a, b: a + b, 1, b=2) == 3
