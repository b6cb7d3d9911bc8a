"""Fixtures: one shop with a worker for all tests of both libraries' behaviours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from tests.servers.redis_server import RedisServer
from tests.worker.conftest import ledger, open_shop, order, server  # noqa: F401
from tests.worker.harness import Shop


def make_app(**settings: Any) -> Celery:
    """Returns an app that is not connected to anything."""
    app = Celery("migrated", broker="memory://", set_as_current=False)
    app.conf.update({"result_backend": "redis://backend"} | settings)
    return app


def make_task(app: Celery, body: Callable[..., Any] = lambda: None, **options: Any) -> Any:
    """Returns an idempotent task of `app` only, with this body."""
    body.__name__ = "task"  # Celery cannot compile the signature of a lambda under its own name
    options = {"base": IdempotentTask, "shared": False, "name": "migrated.task"} | options
    assert options["name"] not in app.tasks
    return app.task(body, lazy=False, **options)


#: A queue that no worker consumes: messages stay in it.
NO_WORKER = "no-worker"


@pytest.fixture(scope="session")
def running_shop(
    open_shop: Callable[..., Shop],  # noqa: F811
    server: RedisServer,  # noqa: F811
) -> Iterator[Shop]:
    once = {"backend": "celery_once.backends.Redis", "settings": {"url": server.url}}
    with open_shop(ONCE=once) as shop:
        shop.start_worker(concurrency=3)
        yield shop


@pytest.fixture
def shop(running_shop: Shop) -> Iterator[Shop]:
    running_shop.app.set_current()
    yield running_shop
    running_shop.ledger.release_all()
    running_shop.redis.delete(NO_WORKER)
    running_shop.print_logs()


@pytest.fixture
def waiting_messages(shop: Shop) -> Callable[[], int]:
    """Returns the number of messages in the queue `NO_WORKER`."""
    return lambda: shop.redis.llen(NO_WORKER)
