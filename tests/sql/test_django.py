"""Functions in a Django process: nested transactions, statements, migrations, messages."""

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


class TestPublishedOnCommit:
    """Both outcomes, the effects, and the messages of two calls; and what is left in the row."""

    def test_every_form_of_a_message_is_published_with_an_id_of_its_own(
        self, calls: dict[str, Any]
    ) -> None:
        assert calls["forms"] == ["bill", *["notify"] * 8, 9, 0]

    def test_what_is_rolled_back_is_not_published(self, calls: dict[str, Any]) -> None:
        error = "ZeroDivisionError: "
        assert calls["rolled_back"] == [error, error, 0, []]
        assert calls["rolled_back_to_a_savepoint"] == [1, 1, 1, ["bill"]]

        error = "IntegrityError: "
        assert calls["replayed_error_of_the_commit"] == [error, error, 0, []]

    def test_a_signal_after_the_commit(self, calls: dict[str, Any]) -> None:
        assert calls["interrupted_after_the_commit"] == [1, 1, 1, ["notify"], 0]

    def test_messages_in_the_row_are_published_once_more_with_the_same_ids(
        self, calls: dict[str, Any]
    ) -> None:
        first, again, left, left_afterwards, same, messages, *afterwards = calls["found_in_the_row"]
        assert (first, again, same, messages) == (1, 1, True, ["notify"])
        assert (left, left_afterwards) == (1, 0)
        assert afterwards == [1, []]

    def test_the_broker_is_unavailable(self, calls: dict[str, Any]) -> None:
        refused, effects, left, *result = calls["broker_was_unavailable"]
        assert (refused, effects, left) == ("StoreUnavailableError", 1, 1)
        assert result == [1, 1, 1, ["notify"]]

    def test_an_expired_row_is_kept_until_its_messages_are_published(
        self, calls: dict[str, Any]
    ) -> None:
        assert calls["expired_before_it_was_published"] == [0, 2, 2, ["notify"] * 2, 0]

    def test_what_could_be_lost_is_refused_before_the_commit(self, calls: dict[str, Any]) -> None:
        reasons = (
            "refused.<locals>.<lambda>) would be lost if the process died",
            "on_commit(partial(builtins.list.append)) would be lost",
            "in_pickle.delay) cannot be stored: ContentDisallowed",
            "notify.delay) cannot be stored: EncodeError",
            "did you mean 'idempotency_key'?",
            "belongs to another Celery app",
            "pass the Celery app to Idempotency()",
        )
        for reason, (error, *rest) in zip(reasons, calls["refused"], strict=True):
            assert error.startswith("TransactionError: ")
            assert reason in error
            assert rest == [0, [], []]

    def test_messages_are_encrypted_like_results(self, calls: dict[str, Any]) -> None:
        assert calls["encrypted"] == ["!json\n", False, 1, 1, 1, ["notify"]]

    def test_robust_functions_are_called_by_django(self, calls: dict[str, Any]) -> None:
        assert calls["robust"] == [1, 1, 1, [], 1]

    def test_a_message_that_can_never_be_published_holds_up_no_other(
        self, calls: dict[str, Any]
    ) -> None:
        assert calls["permanently_refused"] == [1, 1, 1, ["notify"]]

    def test_a_step(self, calls: dict[str, Any]) -> None:
        assert calls["step_that_publishes"] == ["StoreUnavailableError", ["notify"], [], 1]

    def test_a_batch(self, calls: dict[str, Any]) -> None:
        assert calls["batch_that_publishes"] == [
            "StoreUnavailableError",
            ["RUN", "RUN", []],
            ["REPLAY", "REPLAY", ["notify", "notify"]],
            ["REPLAY", "REPLAY", []],
            [1, 1],
        ]
