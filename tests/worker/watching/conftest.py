"""Fixtures: one shop with a prefork worker that sends events and serves metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers.ports import Ports
from tests.worker.harness import Shop, Worker
from tests.worker.monitor import Monitor


@pytest.fixture(scope="package")
def port() -> Iterator[int]:
    with Ports(1) as ports:
        yield ports.numbers[0]


@pytest.fixture(scope="package")
def watched(open_shop: Callable[..., Shop], port: int) -> Iterator[Shop]:
    with open_shop(idempotency_metrics=f"127.0.0.1:{port}", idempotency_lease=30.0) as shop:
        shop.start_worker("--task-events", concurrency=2)
        yield shop


@pytest.fixture
def shop(watched: Shop) -> Iterator[Shop]:
    watched.app.set_current()
    yield watched
    watched.ledger.release_all()
    watched.wait_until_empty()
    watched.print_logs()


@pytest.fixture
def worker(shop: Shop) -> Worker:
    return shop.workers[0]


@pytest.fixture
def monitor(shop: Shop) -> Iterator[Monitor]:
    monitor = Monitor(shop)
    yield monitor
    monitor.stop()
