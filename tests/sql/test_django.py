"""Functions in a Django process: nested transactions, statements, migrations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql.conftest import kinds

CALLS = "django_calls"

pytestmark = pytest.mark.parametrize(
    "calls",
    [
        *kinds("sqlite"),
        pytest.param(
            "pgbouncer",
            marks=[pytest.mark.postgresql, pytest.mark.pgbouncer, pytest.mark.exhaustive],
        ),
    ],
    indirect=True,
)


def test_a_call_inside_atomic_is_refused(calls: dict[str, Any]) -> None:
    refused, *afterwards = calls["inside_atomic"]
    assert refused == "TransactionError"
    assert afterwards == [1, 1, 1, 1], "the key is free"


def test_a_call_under_atomic_requests_is_refused(calls: dict[str, Any]) -> None:
    assert calls["under_atomic_requests"] == ["TransactionError", 0, 0]


def test_claim_and_outcome_are_never_read_from_a_replica(calls: dict[str, Any]) -> None:
    read, outcomes = calls["reads_from_a_replica"]
    assert read == "OperationalError", "the ORM's reads go where the router sends them"
    assert outcomes == [1, 1, 1, 1], "the second one is of the row"


def test_nested_atomic_blocks_are_savepoints(calls: dict[str, Any]) -> None:
    assert calls["nested_atomic"] == [1, 1, 1, 2]


def test_a_batch_is_one_transaction(calls: dict[str, Any]) -> None:
    assert calls["batch"] == [
        ["RUN", "RUN", "RUN"],
        ["REPLAY", "RUN", "REPLAY"],
        ["TransactionError"],
        [1, 1, 1],
    ]


def test_a_body_cannot_return_and_roll_back(calls: dict[str, Any]) -> None:
    assert calls["set_rollback"] == ["TransactionError", "TransactionError", 2, 0]


def test_two_statements_more(calls: dict[str, Any]) -> None:
    assert calls["statements"] == 2


def test_models_and_migrations_agree(calls: dict[str, Any]) -> None:
    assert calls["missing_migrations"] == ""


def test_the_body_uses_the_connection_of_the_alias(calls: dict[str, Any]) -> None:
    assert calls["connection_in_body"]
