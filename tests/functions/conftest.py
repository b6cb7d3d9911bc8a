"""One private server, and an engine on it for each test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_idempotent import Idempotency
from celery_idempotent.testing.server import RedisServer

#: Seconds: a process that a busy machine starves for that long counts as frozen.
LEASE = 2.0


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={}) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """A look at the server past the engine."""
    with server.client() as client:
        yield client


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, lease=LEASE, wait_timeout=20)
    yield engine
    engine.close()


@pytest.fixture
def run(idem: Idempotency) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in an event loop of its own, and hangs up at its end."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def closing() -> Any:
            try:
                return await coroutine
            finally:
                await idem.aclose()

        return asyncio.run(closing())

    return run


@pytest.fixture
def key() -> str:
    """One that no other test has."""
    return uuid4().hex
