"""An eager app on a private server: the whole flow in one process, for exact faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task

from celery_idempotent import IdempotentTask, signals
from celery_idempotent.core.store import node
from celery_idempotent.testing import IsolatedRecords
from tests.apps import close
from tests.flow.deliveries import Deliveries, Offer, pay
from tests.servers.redis_server import RedisServer


@pytest.fixture
def app(server: RedisServer) -> Iterator[Celery]:
    server.client().flushall()
    app = Celery("executor", backend=server.url, set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True, idempotency_lease=1.2)
    yield app
    close(app)


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that keeps its records when it is killed."""
    with RedisServer.start(config={"appendonly": "yes", "appendfsync": "always"}) as server:
        yield server


@pytest.fixture
def broker_app(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """The app with a broker, for deliveries as in a pool child."""
    monkeypatch.setattr(node, "THRESHOLD", 1000)
    app.conf.update(broker_url="memory://", task_always_eager=False, idempotency_lease=60)
    channel = app.connection_for_read().default_channel
    # All apps of a process share the messages in memory.
    for queue in ("celery", "reports"):
        channel.queue_purge(queue)
    yield app
    for queue in ("celery", "reports"):
        channel.queue_purge(queue)


@pytest.fixture
def task(app: Celery) -> Callable[..., IdempotentTask]:
    """``task(body, option=…)``: an idempotent task of this body."""

    def make(body: Callable[..., Any], **options: Any) -> IdempotentTask:
        name = f"executor.{uuid4().hex}"
        named = {f"idempotency_{option}": value for option, value in options.items()}
        made: IdempotentTask = app.task(
            body, base=IdempotentTask, bind=True, shared=False, name=name, lazy=False, **named
        )
        return made

    return make


@pytest.fixture
def idempotency(server: RedisServer) -> IsolatedRecords:
    """Simulates faults on the records of `app`, whose server and prefix these tests access."""
    return IsolatedRecords(server.url, "idem", Counter())


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """The names of the signals that were sent, in order."""
    names: list[str] = []
    receivers = []
    for name in ("begun", "completed", "failed", "released", "lease_lost", "outcome_unsaved"):

        def receive(name: str = name, **_: Any) -> None:
            names.append(name)

        getattr(signals, name).connect(receive)
        receivers.append(receive)
    yield names
    receivers.clear()  # signals have weak references to them


@pytest.fixture
def offer(server: RedisServer) -> Iterator[Offer]:
    """``offer(body, options={…}, setting=…)``: a task of an app of its own, and its deliveries."""
    with server.client() as client:
        client.flushall()
    apps = []

    def make(
        body: Callable[..., Any] = pay, base: type[Task] = IdempotentTask, *,
        options: dict[str, Any] | None = None, **settings: Any,
    ) -> Deliveries:  # fmt: skip
        app = Celery("fused", set_as_current=False)
        app.conf.accept_content = ["json", "pickle", "yaml", "msgpack"]
        app.conf.update({"broker_url": "memory://", "result_backend": server.url, **settings})
        apps.append(app)
        task = app.task(
            body, base=base, bind=True, shared=False, name="fused.pay", lazy=False,
            **(options or {}),
        )  # fmt: skip
        deliveries = Deliveries(app, task)
        deliveries.purge()
        return deliveries

    yield make
    for app in apps:
        close(app)
        app.backend.client.close()
