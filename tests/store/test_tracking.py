"""Waiting until a record changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from celery_idempotent.core.store import run_sync, tracking
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.tracking import POLL_INTERVAL
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import Harness, calls, store_at
from tests.waiting import eventually

#: Seconds; a wait without a change for so long fails a test.
FOR_EVER = 100.0

CHANGES: dict[str, Callable[[Harness, int], object]] = {
    "complete": lambda harness, token: harness.complete(token),
    "fail": lambda harness, token: harness.fail(token),
    "release": lambda harness, token: harness.release(token),
    "extend": lambda harness, token: harness.extend(token, lease_ms=120_000),
    "forget": lambda harness, token: harness.forget(),
    "a flush": lambda harness, token: harness.client.flushall(),
}


def listeners() -> list[threading.Thread]:
    """Return the threads that receive invalidations."""
    return [each for each in threading.enumerate() if each.name == "idempotency-listener"]


@contextmanager
def waiting(harness: Harness, how: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Wait for a change in a thread, and check that the wait ends with the block.

    With the fields of a `StoreConfig`, the wait is on an event loop.
    """
    seen, reads = harness.raw, calls(harness.client, "getrange")
    assert seen is not None

    def wait() -> None:
        if how is None:
            run_sync(harness.store.wait_for_change(harness.key, seen, FOR_EVER))
        else:
            asyncio.run(wait_on_a_loop(RecordStore(StoreConfig(**how), repr, is_async=True)))

    async def wait_on_a_loop(store: RecordStore) -> None:
        await store.ping()
        await store.wait_for_change(harness.key, seen, FOR_EVER)
        await store.aclose()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    eventually(lambda: calls(harness.client, "getrange") > reads)
    yield
    waiter.join(FOR_EVER / 2)
    assert not waiter.is_alive()


@pytest.mark.core
class TestInvalidations:
    @pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_of(
        self,
        harness: Harness,
        site: deployments.Site,
        change: Callable[[Harness, int], object],
        is_async: bool,
    ) -> None:
        token = harness.started().token
        if is_async and "client" in site.how:
            pytest.skip("a client is for one of both")

        with waiting(harness, site.how if is_async else None):
            change(harness, token)

        assert calls(harness.client, "getrange") == 1

    def test_a_change_before_the_wait(self, harness: Harness) -> None:
        before = harness.started()
        seen = harness.raw
        assert seen is not None
        harness.complete(before.token)
        began_at = time.monotonic()

        run_sync(harness.store.wait_for_change(harness.key, seen, FOR_EVER))

        assert time.monotonic() - began_at < FOR_EVER / 2

    def test_the_connection_is_reused(self, harness: Harness) -> None:
        token = harness.started().token
        for lease_ms in (70_000, 80_000, 90_000):
            with waiting(harness):
                harness.extend(token, lease_ms=lease_ms)

        assert calls(harness.client, "subscribe") == 1

    def test_nothing(self, harness: Harness) -> None:
        harness.started()
        began_at = time.monotonic()

        run_sync(harness.store.wait_for_change(harness.key, harness.raw or b"", 0.3))

        assert time.monotonic() - began_at >= 0.3


@pytest.fixture
def own() -> Iterator[RedisServer]:
    rules = "on nopass ~* &* +@all -subscribe"
    with RedisServer.start(config={}, users={"polling": rules}) as server:
        yield server


def test_many_waiting_calls_share_two_connections(own: RedisServer, monkeypatch: Any) -> None:
    harness = Harness(store_at(own.url), own.client())
    monkeypatch.setattr(tracking, "IDLE_TIMEOUT", 0.3)
    monkeypatch.setattr(tracking, "CHECK_INTERVAL", 0.1)
    others = ("a", "b", "c")
    token, seen = harness.started().token, harness.raw or b""
    names = [harness.store.name(harness.key), *others]
    for name in others:
        harness.client.set(name, seen)
    before = harness.client.info("clients")["connected_clients"]
    listener = harness.store.listener()

    def wait(name: str) -> None:
        run_sync(listener.wait_for_change(name, seen, FOR_EVER))

    def connections() -> int:
        return int(harness.client.info("clients")["connected_clients"]) - before

    with ThreadPoolExecutor(40) as pool:
        waits = [pool.submit(wait, name) for name in names * 10]
        eventually(lambda: calls(harness.client, "getrange") == len(names))
        assert connections() == 2
        harness.complete(token)
        for name in others:
            harness.client.delete(name)
        for each in waits:
            each.result(FOR_EVER / 2)

    assert calls(harness.client, "getrange") == len(names)
    eventually(lambda: connections() <= 0)


class TestWithoutInvalidations:
    """Without invalidations, waits end early, as if the record had changed."""

    def test_a_user_who_may_not_subscribe_polls(self, own: RedisServer) -> None:
        harness = Harness(store_at(own.url_as("polling", "any")), own.client())
        harness.started()
        began_at = time.monotonic()

        for _ in range(2):
            run_sync(harness.store.wait_for_change(harness.key, harness.raw or b"", FOR_EVER))

        assert 2 * POLL_INTERVAL <= time.monotonic() - began_at < FOR_EVER / 2
        assert calls(harness.client, "getrange") == 0

    @pytest.mark.parametrize("lost", ["killed server", "frozen server", "reader", "receiver"])
    def test_a_lost_connection_ends_the_wait(self, own: RedisServer, lost: str) -> None:
        harness = Harness(store_at(own.url), own.client())
        harness.started()

        with waiting(harness):
            if lost == "killed server":
                own.kill()
            elif lost == "frozen server":
                own.pause()
            else:
                kind = "normal" if lost == "reader" else "pubsub"
                harness.client.client_kill_filter(_type=kind, skipme=True)

    def test_a_lost_connection_is_replaced(self, own: RedisServer) -> None:
        harness = Harness(store_at(own.url), own.client())
        token = harness.started().token
        with waiting(harness):
            harness.extend(token, lease_ms=70_000)
        for kind in ("pubsub", "normal"):
            harness.client.client_kill_filter(_type=kind, skipme=True)
        eventually(lambda: not listeners(), "the loss is noticed; until then, calls poll")

        with waiting(harness):
            harness.complete(token)
