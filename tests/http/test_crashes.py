"""Web processes that are killed while they run a request, and a store that is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis

from tests.http.drivers.web_server import LEASE, SITES, WebServer, request_count, serving
from tests.servers.redis_server import RedisServer
from tests.waiting import POLL_INTERVAL, eventually

pytestmark = pytest.mark.exhaustive

#: Those whose users send tokens.
NAMES = [name for name in SITES if not name.startswith("django-")]


@pytest.mark.parametrize("site", NAMES)
def test_after_a_crash_another_process_runs_the_request_when_the_lease_ends(
    site: str, django_environment: dict[str, str], client: redis.Redis, key: str
) -> None:
    body = {"order": key}
    app, server, _ = SITES[site]
    with (
        serving(app, server, **django_environment) as first,
        serving(app, server, **django_environment) as second,
        ThreadPoolExecutor(1) as threads,
    ):
        crashed = threads.submit(first.post, "/slow", key, body)
        eventually(lambda: request_count(client, key), "the first process runs the request")
        first.kill()
        killed_at = time.monotonic()
        with pytest.raises(httpx.TransportError):
            crashed.result()
        client.rpush(f"release:{key}", "go")
        responses = [second.post("/slow", key, body)]
        while responses[-1].status_code == 409:
            time.sleep(POLL_INTERVAL)
            responses.append(second.post("/slow", key, body))
        waited = time.monotonic() - killed_at
        again = second.post("/slow", key, body)

    assert len(responses) > 1
    assert all(response.headers["retry-after"] == "1" for response in responses[:-1])
    assert responses[-1].json() == again.json() == {"payment": 2}
    assert request_count(client, key) == 2
    # The heartbeat had at most just extended the lease.
    assert waited > LEASE / 2


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    """The store; the ledger of the apps is another server."""
    with RedisServer.start(config={"appendonly": "yes", "appendfsync": "always"}) as store:
        yield store


@pytest.fixture(scope="module", params=NAMES)
def web(
    request: pytest.FixtureRequest, store: RedisServer, django_environment: dict[str, str]
) -> Iterator[WebServer]:
    app, kind, _ = SITES[request.param]
    with serving(app, kind, **{**django_environment, "STORE_URL": store.url}) as web:
        yield web
    if not store.running:
        store.restart()


@pytest.fixture
def running(web: WebServer, client: redis.Redis, key: str) -> Iterator[Any]:
    """A request that runs until the test releases it."""
    with ThreadPoolExecutor(1) as threads:
        response = threads.submit(web.post, "/slow", key, {"order": key})
        eventually(lambda: request_count(client, key), "the request runs")
        yield response
        client.rpush(f"release:{key}", "go")


def test_a_short_outage_is_unseen(
    web: WebServer, store: RedisServer, running: Any, client: redis.Redis, key: str
) -> None:
    store.kill()
    client.rpush(f"release:{key}", "go")
    store.restart()

    assert running.result().json() == {"payment": 1}
    again = web.post("/slow", key, {"order": key})
    assert again.json() == {"payment": 1}
    assert again.headers["idempotency-replayed"] == "true"


def test_a_long_outage_costs_no_response(
    web: WebServer, store: RedisServer, running: Any, client: redis.Redis, key: str
) -> None:
    """The first client gets its response after one lease; another one gets 503 meanwhile."""
    store.kill()
    client.rpush(f"release:{key}", "go")
    refused = web.post("/slow", key, {"order": key})

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert running.result().json() == {"payment": 1}
    assert request_count(client, key) == 1
    store.restart()
    after = f"{key}-after"

    def is_stored() -> bool:
        return web.post("/status/200", after, {"order": after}).status_code == 200

    eventually(is_stored, "the store is in use again")
