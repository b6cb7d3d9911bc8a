"""Fixtures: a shop for each test, and the dashboard of its app behind a real web server.

Also a shop with a real worker, and the dashboard as a process.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from celery import Celery
from redis import Redis

from celery_idempotent.dashboard import asgi, index, protection, sampler
from celery_idempotent.dashboard.protection import local_user
from tests.apps import close
from tests.dashboard.shop import URL_VARIABLE, make_app
from tests.monitoring.conftest import Shop, client, shop  # noqa: F401
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import FAST_REDELIVERY, Worker, WorkerProcess

Open = Callable[..., httpx.Client]

REPOSITORY = Path(__file__).parents[2]


class Site:
    """The shop and its worker."""

    #: Of its dashboard.
    url = ""
    #: Orders that wait.
    held: tuple[str, ...] = ()

    def __init__(self, app: Celery, redis: Redis, worker: Worker) -> None:
        self.app = app
        self.redis = redis
        self.worker = worker

    def hold(self, order: str) -> None:
        """Lets the calls of an order wait."""
        self.held += (order,)
        self.redis.set(f"held:{order}", "1", ex=300)

    def release(self, order: str) -> None:
        """Lets them go on."""
        self.redis.delete(f"held:{order}")

    def release_all(self, but: tuple[str, ...] = ()) -> None:
        """Lets all calls go on, except those of some orders."""
        for order in self.held:
            if order not in but:
                self.release(order)
        self.held = but

    def publish(self, task: str, *args: Any, **options: Any) -> Any:
        """Publishes a call; returns its result."""
        return self.app.tasks[task].apply_async(args, **options)

    def record(self, task: str, *args: Any) -> Any:
        """Returns the record of a call."""
        return self.app.tasks[task].idempotency_record(*args)

    def wait_for(self, task: str, *args: Any, state: str = "COMPLETED", attempt: int = 1) -> Any:
        """Returns the record of a call in this state and attempt."""

        def record() -> Any:
            found = self.record(task, *args)
            return found if found and (found.state, found.attempt) == (state, attempt) else None

        return eventually(record, f"{task} is {state}, attempt {attempt}: {self.worker.logs()}")


@contextmanager
def open_site(server: RedisServer, directory: Path, concurrency: int = 3) -> Iterator[Site]:
    """Starts a worker."""
    app = make_app(server.url)
    app.conf.broker_transport_options = FAST_REDELIVERY
    options, environment = ("--concurrency", str(concurrency)), {URL_VARIABLE: server.url}
    log, module = directory / "log", "tests.dashboard.shop"
    worker = Worker(WorkerProcess("shop", options, environment, log, module), app)
    with server.client() as redis:
        worker.ready()
        site = Site(app, redis, worker)
        yield site
        site.release_all()
        worker.teardown()
    close(app)


@contextmanager
def dashboard(app: str, *options: str, port: int = 0, **env: str) -> Iterator[tuple[str, Any]]:
    """Starts the command for an app; yields its URL and process, which it kills at the end."""
    command = [sys.executable, "-m", "celery", "-A", app, "idempotency", "dashboard"]
    how = {"env": {**os.environ, "PYTHONUNBUFFERED": "1", **env}, "stdout": subprocess.PIPE}
    how |= {"cwd": REPOSITORY, "text": True, "start_new_session": True}
    process = subprocess.Popen([*command, "--port", str(port), *options], **how)
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"Dashboard: (http://\S+)\n", line)
        assert found, line
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={"databases": "20"}) as server:
        yield server
        # Its connections would be counted as leaks of later tests.
        eventually(lambda: "dashboard" not in names_of_threads(), "the samplers have ended")


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def fields_of(page: httpx.Response) -> dict[str, str]:
    """Returns the hidden fields of a form."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]+)">', page.text))


class Server(uvicorn.Server):
    """Looks a hundred times a second whether it is to end, instead of ten times."""

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the date of all replies
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextmanager
def serving(application: Any, **options: Any) -> Iterator[str]:
    """Serves an ASGI application in a thread, with options of uvicorn; yields its URL."""
    options = {"log_level": "error", "log_config": None, "timeout_graceful_shutdown": 1, **options}
    config = uvicorn.Config(application, port=0, **options)
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
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., httpx.Client]]:
    """Serves the dashboard of the shop with options of `asgi`; returns a client."""
    # Each request reads all records, however long that takes on a busy machine.
    monkeypatch.setattr(index, "QUICK", SOON)
    monkeypatch.setattr(sampler, "FIRST_SECONDS", SOON)
    monkeypatch.setattr(protection, "WRONG_PASSWORD_SECONDS", 0.01)
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
