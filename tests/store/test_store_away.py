"""Redis does not reply, or replies with an error: one error class, one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import StoreUnavailableError
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import RecordHarness, store_at
from tests.waiting import eventually

CALLS: dict[str, Callable[[RecordHarness], object]] = {
    "begin": lambda harness: harness.begin(),
    "complete": lambda harness: harness.complete(17),
    "fail": lambda harness: harness.fail(17),
    "release": lambda harness: harness.release(17),
    "extend": lambda harness: harness.extend(17),
    "save_step": lambda harness: harness.save_step(17),
    "abandon": lambda harness: harness.abandon(),
    "reserve": lambda harness: harness.reserve(),
    "forget": lambda harness: harness.forget(),
    "sent": lambda harness: harness.mark_sent(1),
    "get": lambda harness: run_sync(harness.store.get(harness.key)),
    "ping": lambda harness: run_sync(harness.store.ping()),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_server_refuses_connections(call: str, tmp_path: Path) -> None:
    unreachable = RecordHarness(store_at(f"redis+socket://{tmp_path}/nobody"), redis.Redis())

    with pytest.raises(StoreUnavailableError, match="Redis cannot be reached") as caught:
        CALLS[call](unreachable)
    assert "\n" not in str(caught.value)


def test_the_server_is_frozen(server: RedisServer, harness: RecordHarness) -> None:
    short_timeout = RecordHarness(store_at(server.url + "?socket_timeout=0.3"), harness.client)
    run_sync(short_timeout.store.ping())
    server.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            short_timeout.begin()
    finally:
        server.resume()

    def begins() -> bool:
        try:
            return short_timeout.begin().case in ("begun", "held")
        except StoreUnavailableError:
            return False  # until the next probe

    eventually(begins)


def test_the_server_has_been_restarted(harness: RecordHarness, server: RedisServer) -> None:
    first = harness.started().token
    server.restart()

    reply = harness.begin()

    assert reply.case == "begun"
    assert reply.token > first


@pytest.fixture
def full(server: RedisServer, client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", "1")
    yield
    client.config_set("maxmemory", "0")


def test_the_server_is_full(harness: RecordHarness, full: None) -> None:
    with pytest.raises(StoreUnavailableError, match="Redis replied with an error: .*maxmemory"):
        harness.begin()


@pytest.fixture
def read_only(server: RedisServer, client: redis.Redis) -> Iterator[None]:
    client.replicaof("127.0.0.1", "1")
    yield
    client.replicaof("NO", "ONE")


def test_the_server_has_become_a_replica(harness: RecordHarness, read_only: None) -> None:
    with pytest.raises(StoreUnavailableError):
        harness.begin()


def test_the_server_requires_a_password(harness: RecordHarness, server: RedisServer) -> None:
    harness.client.config_set("requirepass", "secret")
    try:
        unauthenticated = RecordHarness(store_at(server.url), harness.client)
        with pytest.raises(StoreUnavailableError) as caught:
            unauthenticated.begin()
    finally:
        harness.client.config_set("requirepass", "")

    assert "secret" not in str(caught.value)


def test_the_store_recovers_with_the_server(harness: RecordHarness, server: RedisServer) -> None:
    run_sync(harness.store.ping())
    server.kill()
    with pytest.raises(StoreUnavailableError):
        run_sync(harness.store.ping())

    server.restart()

    eventually(lambda: harness.begin().case == "begun")
