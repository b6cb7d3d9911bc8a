"""Tests of `RedisServer`: TLS, users, replication, an own clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.servers.redis_server import RedisServer

needs_tls = pytest.mark.tls
needs_clock = pytest.mark.clock


@needs_tls
def test_tls_clients_must_trust_the_servers_authority() -> None:
    with RedisServer.start(tls=True) as server:
        assert server.url.startswith("rediss://127.0.0.1:")
        assert server.client().ping()
        assert server.client(db=1).connection_pool.connection_kwargs["db"] == 1

        bare = server.url.partition("?")[0]
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            redis.Redis.from_url(bare, retry=None).ping()
        with pytest.raises(redis.ConnectionError):
            redis.Redis.from_url(bare.replace("rediss", "redis"), retry=None).ping()

        server.restart()
        assert server.client().ping()


def seconds_of(client: redis.Redis) -> float:
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


@needs_clock
def test_an_own_clock_can_be_stepped() -> None:
    with (
        RedisServer.start(clock=True) as server,
        RedisServer.start() as other,
    ):
        client = server.client()
        client.set("key", "value", ex=60)
        before = seconds_of(other.client())
        assert abs(seconds_of(client) - before) < 5

        server.step_clock(-30)
        assert abs(seconds_of(client) - before + 30) < 5
        assert 85 < client.ttl("key") <= 90
        server.step_clock(100)
        assert abs(seconds_of(client) - before - 70) < 5
        assert client.get("key") is None

        server.restart()
        assert abs(seconds_of(server.client()) - before - 70) < 5
        assert abs(seconds_of(other.client()) - before) < 5
        assert not list(Path("/dev/shm").glob(f"*faketime_s*_{client.info()['process_id']}"))
