"""Fixtures: a shop for each test, on one server, and its command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.utils.dispatch import Signal
from redis import Redis

from celery_idempotent import IdempotentTask
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.key import Key
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.dashboard.index import RecordIndex
from tests.apps import close, run_command
from tests.monitoring.shop import make_app
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import Harness


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={"slowlog-log-slower-than": "20000"}) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with server.client() as client:
        client.flushall()
        yield client


class Shop:
    """An app with idempotent tasks, its Redis, and its command line."""

    def __init__(self, app: Celery, client: Redis) -> None:
        self.app = app
        self.client = client
        self.url: str = app.conf.broker_url
        self.charge, self.pack, self.tidy = (
            app.tasks[f"shop.{name}"] for name in ("charge", "pack", "tidy")
        )

    @property
    def store(self) -> RecordStore:
        store: RecordStore = self.charge.idempotency_configuration.executor.store
        return store

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of all tasks."""
        return app_tasks.stores(app_tasks.tasks(self.app))

    @contextmanager
    def index(self) -> Iterator[RecordIndex]:
        """The index of a dashboard, which has read all records once."""
        index = RecordIndex(self.stores)
        index.advance(60)
        yield index
        index.close()

    @contextmanager
    def limited(self, *rights: str) -> Iterator[Shop]:
        """The shop with a Redis user of all rights, changed by such ones as ``-info``."""
        rules = ["reset", "on", "nopass", "~*", "+@all", *rights]
        self.client.execute_command("ACL", "SETUSER", "limited", *rules)
        limited = Shop(make_app(self.url.replace("redis://", "redis://limited@")), self.client)
        yield limited
        limited.app.close()

    def celery(self, *arguments: str, code: int = 0, answer: str | None = None) -> str:
        """Runs ``celery -A shop idempotency …``; returns its output, asserts its exit code."""
        return run_command(self.app, *arguments, code=code, answer=answer)

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.celery(*arguments, "--json", code=code))

    def add_task(self, body: Any, name: str, **options: Any) -> Any:
        """Adds an idempotent task with these options."""
        options = {f"idempotency_{option}": value for option, value in options.items()}
        options |= {"base": IdempotentTask, "name": name, "shared": False, "lazy": False}
        return self.app.task(body, **options)

    def add_offloading_task(self, folder: Path) -> Any:
        """Adds a task whose result is stored in `folder`."""

        def scan() -> str:
            return "x" * 1_000

        backend = f"file://{folder}"
        return self.add_task(scan, "shop.scan", max_result_size=10, offload_backend=backend)

    def begin(self, task: Any, *args: Any, lease_ms: int = 60_000, attempt: int = 1) -> Key:
        """Leaves the record of a call STARTED; with a lease of 0, the lease has expired."""
        key: Key = task.idempotency_key_of(*args)
        harness = Harness(task.idempotency_configuration.executor.store, self.client, key)
        whose: dict[str, Any] = {"task_id": f"task-of-{key.digest}", "worker": "celery@here/4711"}
        for _ in range(attempt):
            harness.abandon(**whose)
            harness.started(**whose, lease_ms=lease_ms or 60_000)
        if lease_ms == 0:
            harness.abandon(**whose)
        return key

    def receive(self, task: Any, *args: Any, task_id: str = "") -> str:
        """Runs a message of `task` as a pool child does; returns the key."""
        task_id = task_id or task.idempotency_key_of(*args).digest
        delivery = {"exchange": "", "routing_key": "celery", "priority": 3}
        request = {"id": task_id, "task": task.name, "args": args, "kwargs": {}, "hostname": "here"}
        request |= {"delivery_info": delivery, "properties": {"content_type": "application/json"}}
        tracer = build_tracer(task.name, task, self.app.loader, "here", app=self.app)
        tracer(task_id, args, {}, request)
        return str(task.idempotency_key_of(*args))

    def published(self) -> list[dict[str, Any]]:
        """Returns the messages in the broker."""
        queues = [b"celery", *self.client.keys("celery\x06*")]
        texts = {text for queue in queues for text in self.client.lrange(queue, 0, -1)}
        return [json.loads(text) for text in texts]


@pytest.fixture
def shop(server: RedisServer, client: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    # No worker runs that could reply.
    show = import_module("celery_idempotent.operations.cli.show")
    monkeypatch.setattr(show, "WORKER_TIMEOUT", 0)
    app = make_app(server.url)
    yield Shop(app, client)
    close(app)


@contextmanager
def received(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """The arguments with which a signal is sent meanwhile."""
    sent: list[dict[str, Any]] = []

    def receive(**details: Any) -> None:
        sent.append(details)

    signal.connect(receive)
    yield sent
    signal.disconnect(receive)


def list_json(shop: Shop, *options: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in shop.celery("list", *options, "--json").splitlines()]


def copy(shop: Shop, times: int, key: str = "shop.charge:{:022d}") -> None:
    """Executes the call for order 1, and copies its record."""
    shop.charge.apply((1, 999))
    raw = shop.client.get(f"idem:{shop.charge.idempotency_key_of(1, 999)}")
    pipeline = shop.client.pipeline(transaction=False)
    for number in range(times):
        pipeline.set(f"idem:{key.format(number)}", raw, px=3_600_000)
    pipeline.execute()
