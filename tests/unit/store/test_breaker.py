"""The circuit breaker: when it opens, probes and closes; and the log of an outage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable

import pytest

from celery_idempotent.core.events import report
from celery_idempotent.core.store import node as module
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.node import Breaker, OutageLogger
from celery_idempotent.errors import StoreUnavailableError
from tests.unit.conftest import Clock


class Redis:
    """Replies to the probe or not, and counts probes."""

    def __init__(self) -> None:
        self.away = True
        self.probes = 0

    async def probe(self) -> None:
        self.probes += 1
        if self.away:
            raise StoreUnavailableError("Redis cannot be reached: refused")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(module, "MAX_DELAY", 8.0)
    return clock


@pytest.fixture
def redis() -> Redis:
    return Redis()


@pytest.fixture
def breaker(redis: Redis, clock: Clock) -> Breaker:
    return Breaker(redis.probe)


def fail(breaker: Breaker, times: int = 2) -> None:
    for _ in range(times):
        run_sync(breaker.check())
        breaker.record_failure()


def refused(breaker: Breaker) -> bool:
    try:
        run_sync(breaker.check())
    except StoreUnavailableError:
        return True
    return False


def test_failures_between_replies_do_not_open_it(breaker: Breaker) -> None:
    for _ in range(100):
        fail(breaker, 1)
        assert not refused(breaker)
        breaker.record_success()

    assert not breaker.open


def test_failures_in_a_row_open_it_until_another_succeeds(breaker: Breaker, redis: Redis) -> None:
    fail(breaker)
    with pytest.raises(
        StoreUnavailableError, match=r"not replied 2 times .* next attempt is in [01]\.\d s$"
    ):
        run_sync(breaker.check())

    breaker.record_success()  # of a heartbeat, for example

    assert not refused(breaker)
    assert redis.probes == 0


def test_after_a_delay_one_probe_closes_it(breaker: Breaker, redis: Redis, clock: Clock) -> None:
    fail(breaker)
    redis.away = False
    clock.now += module.FIRST_DELAY

    assert not refused(breaker)
    assert redis.probes == 1
    assert not breaker.open


def test_the_delay_doubles_up_to_the_maximum(breaker: Breaker, redis: Redis, clock: Clock) -> None:
    fail(breaker)
    waited = []
    for _ in range(6):
        before, probes = clock.now, redis.probes
        while redis.probes == probes:
            assert refused(breaker)
            clock.now += 0.05
        waited.append(clock.now - before)

    for seconds, pause in zip(waited, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * pause <= seconds <= pause + 0.15


def test_during_a_probe_others_fail_at_once(clock: Clock, breaker: Breaker, redis: Redis) -> None:
    asking, reply = threading.Event(), threading.Event()

    async def slow_probe() -> None:
        asking.set()
        reply.wait(10)

    breaker = Breaker(slow_probe)
    fail(breaker)
    clock.now += module.FIRST_DELAY
    prober = threading.Thread(target=lambda: run_sync(breaker.check()))
    prober.start()
    asking.wait(10)

    assert refused(breaker)
    reply.set()
    prober.join(10)
    assert not refused(breaker)


def test_a_reply_counts_while_another_thread_opens_it(breaker: Breaker, redis: Redis) -> None:
    fail(breaker, 1)
    breaker.record_success()
    breaker.open = True  # by the other thread, which had compared the failures before

    assert not refused(breaker)
    assert not breaker.open
    assert redis.probes == 0


def test_another_probe_follows_one_that_was_interrupted(clock: Clock) -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def answered() -> None:
        pass

    probes: list[Callable[[], Awaitable[None]]] = [interrupted, answered]
    breaker = Breaker(lambda: probes.pop(0)())
    fail(breaker)
    clock.now += module.FIRST_DELAY
    with pytest.raises(KeyboardInterrupt):
        run_sync(breaker.check())
    assert refused(breaker)
    clock.now += 2 * module.FIRST_DELAY

    assert not refused(breaker)


@pytest.fixture
def outage() -> OutageLogger:
    return OutageLogger(str(StoreConfig(url="redis://:secret@shop/0")))


def test_there_is_one_line_a_minute(outage: OutageLogger, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(report, "monotonic", lambda: now)
    assert [outage.count_failure() for _ in range(3)] == [0, None, None]
    now += report.INTERVAL

    assert [outage.count_failure() for _ in range(2)] == [2, None]


def test_its_end_is_one_line(outage: OutageLogger, caplog: pytest.LogCaptureFixture) -> None:
    outage.count_failure()
    outage.end()
    assert caplog.records == [], "of a single call"

    assert [outage.count_failure() for _ in range(3)] == [0, None, None], "the next outage"
    outage.end()
    outage.end()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "3 calls could not reach it" in record.getMessage()
    assert "secret" not in record.getMessage()
