"""A private server for the session, and an engine on it for each test."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_idempotent import Idempotency
from tests.functions.shop import Shop
from tests.servers.redis_server import RedisServer

#: Seconds. On a busy machine a process may be paused for so long that its lease expires.
LEASE = 2.0


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={}) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """A client that does not belong to the engine."""
    with server.client() as client:
        yield client


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, lease=LEASE, wait_timeout=20)
    yield engine
    engine.close()


@pytest.fixture(params=["blocking", "async"])
def shop(
    request: pytest.FixtureRequest,
    idem: Idempotency,
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> Shop:
    return Shop(idem, run, request.param)


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return uuid4().hex
