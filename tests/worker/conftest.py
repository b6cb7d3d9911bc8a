"""A server for the session, a shop with a worker for each module, and shops to be opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    # With a configuration of its own it is a private one, whatever REDIS_URL says.
    with RedisServer.start(config={"databases": "200"}) as server:
        yield server


@pytest.fixture(scope="session")
def open_shop(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Shop]:
    """``with open_shop(setting=value) as shop:`` — for tests that need workers of their own."""
    return lambda **settings: Shop(server, tmp_path_factory.mktemp("shop"), **settings)


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with open_shop() as shop:
        shop.start_worker(concurrency=4)
        yield shop


@pytest.fixture
def shop(shared_shop: Shop) -> Iterator[Shop]:
    """The shop whose worker the module's tests share; each test has an order of its own."""
    shared_shop.app.set_current()
    yield shared_shop
    shared_shop.ledger.release_all()
    shared_shop.print_logs()


@pytest.fixture
def ledger(shop: Shop) -> Ledger:
    return shop.ledger


@pytest.fixture
def order() -> str:
    """An order that no other test knows."""
    return uuid4().hex
