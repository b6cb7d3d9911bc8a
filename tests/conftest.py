"""Groups tests by module for pytest-xdist, and skips tests whose prerequisites are missing.

Also reports that tests with the mark `exhaustive` were left out, which only ``make test-all`` runs;
and fixtures of several folders.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery._state import _set_task_join_will_block
from celery.signals import task_postrun
from celery.utils.dispatch import Signal
from redis import Redis

from celery_idempotent import Idempotency, signals
from celery_idempotent.core.events import report
from celery_idempotent.core.lease import heartbeat
from tests.faults.proxy import Proxy
from tests.servers.program import find_chromium, find_faketime, find_promtool
from tests.servers.rabbitmq import RabbitMQ, find_rabbitmq
from tests.servers.redis_server import RedisServer, find_tls_servers
from tests.servers.sql_server import find_mariadb, find_pgbouncer, find_postgres

TESTS = Path(__file__).parent
# Each store of a test has a thread; faulthandler shows a hundred threads.
heartbeat.IDLE_SECONDS = 1.0
#: Folders whose tests wait for servers and workers. They run before the others and after those with
#: the mark `slow`, so that none of them runs alone at the end.
SLOW_FOLDERS = {
    *("worker", "packaging", "servers", "examples", "functions", "http", "labs", "monitoring"),
    *("sql", "dashboard"),
}


#: For each mark: how to find its prerequisite, its name, and Debian's package of it.
PREREQUISITES: dict[str, tuple[Callable[[], object], str, str]] = {
    "browser": (find_chromium, "Chromium", "chromium-headless-shell"),
    "clock": (find_faketime, "libfaketime", "libfaketime"),
    "prometheus": (find_promtool, "Prometheus", "prometheus"),
    "rabbitmq": (find_rabbitmq, "RabbitMQ", "rabbitmq-server"),
    "mariadb": (find_mariadb, "MariaDB", "mariadb-server"),
    "pgbouncer": (find_pgbouncer, "PgBouncer", "pgbouncer"),
    "postgresql": (find_postgres, "PostgreSQL", "postgresql"),
    "tls": (find_tls_servers, "a Redis with TLS", "redis-server"),
}


#: Marks of tests that `make test` leaves out, because what they need takes long to start.
EXHAUSTIVE = {"browser", "rabbitmq"}


def exhaustive_except(names: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns `names` as parameters; those that are not in `kept` are marked exhaustive."""
    exhaustive = pytest.mark.exhaustive
    return [name if name in kept else pytest.param(name, marks=exhaustive) for name in names]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if "not exhaustive" in config.option.markexpr:
        terminalreporter.section("left out")
        terminalreporter.write_line(
            "Tests of further deployments, brokers, pools and databases, and long ones: "
            "`make test-all` also runs them."
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from searching the tests, which live as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs each module in one process of pytest-xdist, because its tests share Celery workers.

    Tests that have workers of their own have an `xdist_group` mark of their own; without a name, it
    is a group for each test. Those that need RabbitMQ run in one process, because it takes seconds
    to start.
    """
    for item in items:
        if not EXHAUSTIVE.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker(pytest.mark.exhaustive)
        group_mark = item.get_closest_marker("xdist_group")
        if group_mark is None:
            with_rabbitmq = item.get_closest_marker("rabbitmq") is not None
            group = "rabbitmq" if with_rabbitmq else str(item.path.relative_to(TESTS))
            item.add_marker(pytest.mark.xdist_group(group))
        elif not group_mark.args:
            item.add_marker(pytest.mark.xdist_group(item.nodeid), append=False)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_when_to_run)


def _when_to_run(item: pytest.Item) -> tuple[bool, bool]:
    folder = item.path.relative_to(TESTS).parts[0]
    return item.get_closest_marker("slow") is None, folder not in SLOW_FOLDERS


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures start a server
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose prerequisite is missing; in CI, fails it."""
    for mark, (find, name, package) in PREREQUISITES.items():
        if item.get_closest_marker(mark) and not find():
            message = f"{name} is not installed: apt-get install {package}"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
    # A worker that an earlier test has run in this process forbids `result.get()` in eager tasks.
    _set_task_join_will_block(False)


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """A Redis of this session; some folders have another one."""
    with RedisServer.start(config={}) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """Between a client and the server; it can lose replies."""
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def order() -> str:
    """A unique order."""
    return uuid4().hex


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return uuid4().hex


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A broker that all tests share; each has queues of its own."""
    with RabbitMQ.start() as server:
        yield server


@pytest.fixture
def run(idem: Idempotency) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine in an event loop of its own, then closes the loop's connections."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def run_and_close() -> Any:
            try:
                return await coroutine
            finally:
                await idem.aclose()

        return asyncio.run(run_and_close())

    return run


@pytest.fixture
def restored_receivers() -> Iterator[None]:
    """Afterwards disconnects what the test has connected to signals and counters."""
    connected = [signal for signal in vars(signals).values() if isinstance(signal, Signal)]
    connected.append(task_postrun)
    receivers = [list(signal.receivers) for signal in connected]
    counters = list(report.counters)
    yield
    for signal, before in zip(connected, receivers, strict=True):
        signal.receivers = before
        signal.sender_receivers_cache.clear()
    report.counters[:] = counters
