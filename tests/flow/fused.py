"""A task whose completion is fused, and what its deliveries send to the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task

from celery_idempotent import IdempotentTask
from tests.apps import close
from tests.flow.deliveries import Deliveries
from tests.servers.redis_server import RedisServer

ROOT = Path(__file__).parents[2]

#: The commands of a run, without those inside the scripts.
FUSED = ["EVALSHA", "EVALSHA"]
BY_CELERY = [*FUSED, "GET", "MULTI", "SETEX", "PUBLISH", "EXEC"]

Offer = Callable[..., Deliveries]


def pay(self: Any, order: str) -> Any:
    if order == "add to the chain":
        self.add_to_chain(self.si("next"))
    return {"receipt": order}


def receipt(self: Any, order: str) -> str:
    return uuid4().hex


def long_text(self: Any, order: str) -> str:
    return order * 100


def unserialisable(self: Any, order: str) -> object:
    return object()


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
        accept = ["json", "pickle", "yaml", "msgpack"]
        app.conf.update(
            {"broker_url": "memory://", "result_backend": server.url, "accept_content": accept}
        )
        app.conf.update(settings)
        apps.append(app)
        app.connection_for_read().default_channel.queue_purge("celery")
        task = app.task(
            body, base=base, bind=True, shared=False, name="fused.pay", lazy=False,
            **(options or {}),
        )  # fmt: skip
        return Deliveries(app, task)

    yield make
    for app in apps:
        close(app)
        app.backend.client.close()


@contextmanager
def recorded(server: RedisServer) -> Iterator[list[str]]:
    """Yields a list, which gets the commands that clients send to the server in the block."""
    commands: list[str] = []
    with server.client() as client, client.monitor() as monitor:
        client.ping()  # connects
        while monitor.next_command()["command"] != "PING":
            pass
        yield commands
        client.echo("end")
        while (received := monitor.next_command())["command"] != "ECHO end":
            name = received["command"].partition(" ")[0].upper()
            # Results that nobody waits for any more are unsubscribed from at any time.
            if received["client_type"] != "lua" and not name.endswith("SUBSCRIBE"):
                commands.append(name)


def sent_by(server: RedisServer, deliveries: Deliveries, **options: Any) -> list[str]:
    """Returns what a delivery sends once all connections are open and all scripts are loaded."""
    deliveries.deliver(deliveries.publish("warm-up", **options))
    message = deliveries.publish("order", **options)
    with recorded(server) as sent:
        assert deliveries.deliver(message).state == "success"
    return sent


def meta_of(deliveries: Deliveries, task_id: str) -> dict[str, Any]:
    """Returns what the result backend has, as every reader decodes it."""
    deliveries.app.backend._cache.clear()
    meta: dict[str, Any] = deliveries.app.backend.get_task_meta(task_id)
    return meta
