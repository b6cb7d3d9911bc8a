"""A test marked `rabbitmq` is skipped where there is none, but not in CI: there it fails."""

from __future__ import annotations

import os

import pytest

from celery_idempotent.testing.rabbitmq import find_rabbitmq


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures start a broker
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("rabbitmq") and find_rabbitmq() is None:
        missing = "no RabbitMQ here: apt-get install rabbitmq-server"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
