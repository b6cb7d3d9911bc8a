"""Fixtures: a server, a shop with a worker, and a factory of shops, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.program import Ports
from tests.servers.redis_server import RedisServer
from tests.worker.harness import Monitor, OpenShop, Shop
from tests.worker.ledger import Ledger


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder: all of them start workers."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.worker)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Names a task, or a function, by its name."""
    return getattr(val, "name", None) or getattr(val, "__name__", None)


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={"databases": "200"}) as server:
        yield server


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    """A server for the records alone, which a test may stop; it keeps them."""
    with RedisServer.start(config={"appendonly": "yes", "appendfsync": "always"}) as store:
        yield store


@pytest.fixture(scope="session")
def open_shop(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> OpenShop:
    """``with open_shop(setting=value) as shop:``, for tests that need their own workers."""
    return lambda **settings: Shop(server, tmp_path_factory.mktemp("shop"), **settings)


@pytest.fixture(scope="session")
def default_shop(open_shop: OpenShop) -> Iterator[Shop]:
    with open_shop() as shop:
        shop.start_worker(concurrency=4)
        yield shop


@pytest.fixture(scope="module")
def shared_shop(request: Any, open_shop: OpenShop) -> Iterator[Shop]:
    """The shop of all modules, or one with the settings in `SHOP` of this module.

    It has one worker, or one for each of the lists of options in `WORKERS`.
    """
    settings = getattr(request.module, "SHOP", None)
    if settings is None:
        yield request.getfixturevalue("default_shop")
        return
    # As root, Celery accepts pickle only with this variable.
    environment = {"C_FORCE_ROOT": "1"} if "accept_content" in settings else {}
    with open_shop(**settings) as shop:
        for options in getattr(request.module, "WORKERS", [["--concurrency=4"]]):
            shop.start_worker(*options, **environment)
        yield shop


@pytest.fixture
def shop(shared_shop: Shop) -> Iterator[Shop]:
    """The shop that the tests of a module share; each has its own order."""
    shared_shop.app.set_current()
    yield shared_shop
    shared_shop.ledger.release_all()
    shared_shop.print_logs()


@pytest.fixture
def ledger(shop: Shop) -> Ledger:
    return shop.ledger


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A free port, on which a worker serves metrics."""
    with Ports(1) as ports:
        yield ports.numbers[0]


@pytest.fixture(scope="module")
def monitor(shared_shop: Shop) -> Iterator[Monitor]:
    monitor = Monitor(shared_shop)
    yield monitor
    monitor.stop()
