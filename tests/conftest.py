"""What holds for every test: what it shares a process with, and what it does without a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_idempotent.testing.clock import find_faketime
from celery_idempotent.testing.discovery import Binary, find_servers
from tests.servers.rabbitmq import find_rabbitmq

TESTS = Path(__file__).parent
#: These wait for servers and workers to come up. They go first, so that none of them runs alone
#: at the end.
LONG = ("worker", "packaging", "servers", "examples", "functions", "labs", "monitoring")


def has_tls() -> bool:
    return any(isinstance(found, Binary) and found.has_tls for found in find_servers().values())


#: By mark: whether it is there, and what to do if not.
NEEDS: dict[str, tuple[Callable[[], object], str]] = {
    "clock": (find_faketime, "no libfaketime here: apt-get install libfaketime"),
    "rabbitmq": (find_rabbitmq, "no RabbitMQ here: apt-get install rabbitmq-server"),
    "tls": (has_tls, "no Redis with TLS here: apt-get install redis-server"),
}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests share Celery workers, so one process of pytest-xdist is to run them all.

    Where some of them have workers of their own, they say so by a mark of their own.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in LONG)


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures start a server
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test whose mark names what it needs is skipped where that is missing; in CI it fails."""
    for mark, (there, missing) in NEEDS.items():
        if item.get_closest_marker(mark) and not there():
            if os.environ.get("CI") == "true":
                pytest.fail(missing)
            pytest.skip(missing)
