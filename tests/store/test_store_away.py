"""Redis does not reply, or replies with an error: one error class, one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import StoreUnavailableError
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import CALLS, Harness, store_at
from tests.waiting import eventually

OTHERS: dict[str, Callable[[Harness, int], object]] = {
    "sent": Harness.mark_sent,
    "get": lambda harness, token: run_sync(harness.store.get(harness.key)),
    "ping": lambda harness, token: run_sync(harness.store.ping()),
}


@pytest.mark.parametrize("call", [*(name for name in CALLS if name != "hold"), *OTHERS])
def test_the_server_refuses_connections(call: str, tmp_path: Path) -> None:
    unreachable = Harness(store_at(f"redis+socket://{tmp_path}/nobody"), redis.Redis())

    with pytest.raises(StoreUnavailableError, match="Redis cannot be reached") as caught:
        {**CALLS, **OTHERS}[call](unreachable, 17)
    assert "\n" not in str(caught.value)


def test_the_server_is_frozen(server: RedisServer, harness: Harness) -> None:
    short_timeout = Harness(store_at(server.url + "?socket_timeout=0.3"), harness.client)
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


@pytest.mark.parametrize(
    ("name", "value", "normal", "error"),
    [
        ("maxmemory", "1", "0", "Redis replied with an error: .*maxmemory"),
        ("requirepass", "secret", "", "Redis"),
        ("replicaof", "127.0.0.1 1", "no one", "Redis"),
    ],
    ids=["it is full", "it requires a password", "it has become a replica"],
)
def test_the_server_refuses_commands(
    harness: Harness, server: RedisServer, name: str, value: str, normal: str, error: str
) -> None:
    with server.client() as client:
        client.ping()  # connected before the password is required
        change = (name,) if name == "replicaof" else ("config", "set", name)
        client.execute_command(*change, *(value.split() or [""]))
        try:
            with pytest.raises(StoreUnavailableError, match=error) as caught:
                Harness(store_at(server.url), client).begin()
        finally:
            client.execute_command(*change, *(normal.split() or [""]))

    assert "secret" not in str(caught.value)
