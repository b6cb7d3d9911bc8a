"""A shop with a real worker for the browser, and the dashboard as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from redis import Redis

from tests.apps import close
from tests.dashboard.shop import URL_VARIABLE, make_app
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually
from tests.worker.harness import FAST_REDELIVERY, Worker, WorkerProcess


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
    process = WorkerProcess(
        "shop",
        ("--concurrency", str(concurrency)),
        {URL_VARIABLE: server.url},
        directory / "log",
        "tests.dashboard.shop",
    )
    worker = Worker(process, app)
    with server.client() as redis:
        worker.ready()
        site = Site(app, redis, worker)
        yield site
        site.release_all()
        worker.teardown()
    close(app)


REPOSITORY = Path(__file__).parents[2]


class DashboardProcess(NamedTuple):
    """A dashboard that accepts requests."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def dashboard(app: str, *options: str, port: int = 0, **env: str) -> Iterator[DashboardProcess]:
    """Starts the command for an app; kills it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", app, "idempotency", "dashboard",
         "--port", str(port), *options],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"Dashboard: (http://\S+)\n", line)
        assert found, line
        yield DashboardProcess(found[1], process)
    finally:
        process.kill()
        process.communicate()
