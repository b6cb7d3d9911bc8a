"""Fixtures: a shop for each test, and the dashboard of its app behind a real web server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from celery_idempotent.dashboard import asgi
from celery_idempotent.dashboard.protection import local_user
from tests.monitoring.conftest import Shop, client, shop  # noqa: F401
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={"databases": "20"}) as server:
        yield server
        # Its connections would be counted as leaks of later tests.
        eventually(lambda: "dashboard" not in names_of_threads(), "the samplers have ended")


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


class Server(uvicorn.Server):
    """Looks a hundred times a second whether it is to end, instead of ten times."""

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the date of all replies
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextmanager
def serving(application: Any) -> Iterator[str]:
    """Serves an ASGI application in a thread; yields its URL."""
    config = uvicorn.Config(
        application, port=0, log_level="error", log_config=None, timeout_graceful_shutdown=1
    )
    server = Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, "the web server accepts connections")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def open_dashboard(
    shop: Shop,  # noqa: F811
) -> Iterator[Callable[..., httpx.Client]]:
    """Serves the dashboard of the shop with options of `asgi`; returns a client."""
    with ExitStack() as stack:

        def open_dashboard(**options: Any) -> httpx.Client:
            if not {"auth", "authorize"} & set(options):
                options["authorize"] = local_user
            url = stack.enter_context(serving(asgi(shop.app, **options)))
            return stack.enter_context(httpx.Client(base_url=url, timeout=60))

        yield open_dashboard


@pytest.fixture
def web(open_dashboard: Callable[..., httpx.Client]) -> httpx.Client:
    """A client with every right."""
    return open_dashboard()
