"""Functions in a Django process: nested transactions, on_commit, statements, migrations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.sql.conftest import kinds
from tests.sql.databases import REPOSITORY, TestDatabase

pytestmark = pytest.mark.parametrize("calls", kinds("sqlite"), indirect=True)


@pytest.fixture(scope="module")
def calls(
    request: pytest.FixtureRequest,
    server: RedisServer,
    create_database: Callable[..., TestDatabase],
) -> dict[str, Any]:
    database = create_database(request.param, "django")
    done = subprocess.run(
        [sys.executable, "-m", "tests.sql.django_calls", database.url, server.url],
        cwd=REPOSITORY,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_a_call_inside_atomic_is_refused(calls: dict[str, Any]) -> None:
    refused, *afterwards = calls["inside_atomic"]
    assert refused == "TransactionError"
    assert afterwards == [1, 1, 1, 1], "the key is free"


def test_a_call_under_atomic_requests_is_refused(calls: dict[str, Any]) -> None:
    assert calls["under_atomic_requests"] == ["TransactionError", 0, 0]


def test_nested_atomic_blocks_are_savepoints(calls: dict[str, Any]) -> None:
    assert calls["nested_atomic"] == [1, 1, 1, 2]


def test_a_body_cannot_return_and_roll_back(calls: dict[str, Any]) -> None:
    assert calls["set_rollback"] == ["TransactionError", "TransactionError", 2, 0]


def test_an_error_of_on_commit_does_not_change_the_outcome(calls: dict[str, Any]) -> None:
    assert calls["failing_on_commit"] == [1, 1, 1, 1]


def test_two_statements_more(calls: dict[str, Any]) -> None:
    assert calls["statements"] == 2


def test_models_and_migrations_agree(calls: dict[str, Any]) -> None:
    assert calls["missing_migrations"] == ""


def test_the_body_uses_the_connection_of_the_alias(calls: dict[str, Any]) -> None:
    assert calls["connection_in_body"]
