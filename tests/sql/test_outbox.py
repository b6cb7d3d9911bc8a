"""What a body publishes on commit of a Django transaction: at least once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.servers.redis_server import RedisServer
from tests.sql.conftest import MARKS, kinds
from tests.sql.databases import KINDS, TestDatabase
from tests.sql.harness import Shop
from tests.sql.shop import breakpoint_of
from tests.waiting import SOON, eventually

CALLS = "outbox_calls"

#: Where the process dies that has messages to publish.
POINTS = ("outcome written", "before on_commit", "committed", "published", "record completed")


@pytest.mark.worker
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[*MARKS[kind], *([] if kind == "sqlite" else [pytest.mark.exhaustive])]
        )
        for kind in KINDS
    ],
)
def test_a_process_that_is_killed_loses_no_message(
    kind: str,
    server: RedisServer,
    create_database: Callable[..., TestDatabase],
    tmp_path: Path,
) -> None:
    database = create_database(kind, "django")
    with Shop(server, database, "django", tmp_path) as shop:
        orders = {point: uuid4().hex for point in POINTS}
        results = {}
        for point, order in orders.items():
            breakpoint_of(shop.breakpoints, order, point).touch()
            results[point] = shop.app.send_task(
                "sql_shop.charge_and_notify", (order, f"note {order}")
            )
        receipts = {point: result.get(timeout=SOON) for point, result in results.items()}
        for point, order in orders.items():
            assert shop.was_killed(order, point)
            again = shop.app.send_task("sql_shop.charge_and_notify", (order, f"note {order}"))
            assert again.get(timeout=SOON) == receipts[point]
            assert database.effects(order) == 1, point
            eventually(lambda order=order: database.effects(f"note {order}"), f"after {point}")
        # No message is left that would write another one.
        last = shop.app.send_task("sql_shop.charge_and_notify", ("last", "note last"))
        last.get(timeout=SOON)
        eventually(lambda: database.effects("note last"))
        assert [database.effects(f"note {order}") for order in orders.values()] == [1] * len(POINTS)


@pytest.mark.parametrize("calls", kinds("sqlite"), indirect=True)
class TestCalls:
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
        assert calls["step"] == ["StoreUnavailableError", ["notify"], [], 1]

    def test_a_batch(self, calls: dict[str, Any]) -> None:
        assert calls["batch"] == [
            "StoreUnavailableError",
            ["RUN", "RUN", []],
            ["REPLAY", "REPLAY", ["notify", "notify"]],
            ["REPLAY", "REPLAY", []],
            [1, 1],
        ]
