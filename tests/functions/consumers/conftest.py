"""Brokers, and a harness on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent import Idempotency
from tests.functions.consumers.harness import SHORT_VISIBILITY, ConsumerHarness
from tests.servers.redis_server import RedisServer


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def broker(request: pytest.FixtureRequest, server: RedisServer) -> tuple[str, dict[str, Any]]:
    if request.param == "rabbitmq":
        return request.getfixturevalue("rabbitmq").url, {"confirm_publish": True}
    return server.url, SHORT_VISIBILITY


@pytest.fixture
def harness(idem: Idempotency, broker: tuple[str, dict[str, Any]]) -> Iterator[ConsumerHarness]:
    harness = ConsumerHarness(idem, broker)
    yield harness
    harness.connection.release()
