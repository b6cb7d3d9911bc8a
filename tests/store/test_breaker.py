"""The circuit breaker with a server that is killed or frozen, and recovers."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator

import pytest

from celery_idempotent.core.store import node as module
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.node import PROBE_TIMEOUT, THRESHOLD
from celery_idempotent.errors import StoreUnavailableError
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import Harness, RecordReply, store_at

#: Longer than a test, which moves the clock before each probe.
FOR_EVER = 3600.0
#: Far longer than the timeout of a probe.
TIMEOUT = 4.0


class Clock:
    """The clock of the breaker."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def pass_delay(self) -> None:
        """Move the clock past the delay before the next probe."""
        self._ahead += 2 * FOR_EVER


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(module, "FIRST_DELAY", FOR_EVER)
    monkeypatch.setattr(module, "MAX_DELAY", FOR_EVER)
    return clock


@pytest.fixture
def harness(server: RedisServer, clock: Clock) -> Iterator[Harness]:
    """A store whose breaker opens at the second failure and probes after an hour."""
    store = store_at(server.url, timeout=TIMEOUT)
    run_sync(store.ping())
    yield Harness(store, server.client())
    server.resume()


def open_the_breaker(harness: Harness) -> None:
    for _ in range(THRESHOLD):
        with pytest.raises(StoreUnavailableError):
            harness.begin()
    assert harness.store.node.breaker.open


def fail_at_once(harness: Harness) -> float:
    """Return the seconds of a call that fails because the breaker is open."""
    began_at = time.perf_counter()
    with pytest.raises(StoreUnavailableError, match="the next attempt is in"):
        run_sync(harness.store.get(harness.key))
    return time.perf_counter() - began_at


@pytest.mark.parametrize("by", [Harness.extend, Harness.complete])
def test_a_heartbeat_and_an_outcome_find_the_server_before_the_delay_ends(
    harness: Harness, server: RedisServer, by: Callable[..., RecordReply]
) -> None:
    server.kill()
    open_the_breaker(harness)
    server.restart()

    assert by(harness, 17).case == "lost"
    assert not harness.store.node.breaker.open
    assert harness.begin().case == "begun"


def test_a_frozen_server_costs_one_probe_after_each_delay(
    harness: Harness, server: RedisServer, clock: Clock
) -> None:
    with Proxy(server.url) as proxy:
        behind = Harness(store_at(proxy.url, timeout=0.2), harness.client)
        server.pause()
        open_the_breaker(behind)
        requests = len(proxy.requests)
        for probes in (1, 2):
            clock.pass_delay()
            began_at = time.monotonic()
            with pytest.raises(StoreUnavailableError, match="cannot be reached"):
                behind.begin()
            taken = time.monotonic() - began_at
            for _ in range(100):
                fail_at_once(behind)

            assert PROBE_TIMEOUT * 0.9 <= taken < TIMEOUT / 2
            assert len(proxy.requests) == requests + probes


def test_a_probe_without_a_descriptor_fails_as_without_a_reply(
    server: RedisServer, harness: Harness, clock: Clock
) -> None:
    server.kill()
    open_the_breaker(harness)
    server.restart()
    clock.pass_delay()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        with pytest.raises(StoreUnavailableError, match="Too many open files"):
            harness.begin()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)

    clock.pass_delay()
    assert harness.begin().case == "begun"
