"""What a body publishes on commit of a Django transaction: at least once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.servers.redis_server import RedisServer
from tests.sql.conftest import kinds
from tests.sql.databases import TestDatabase
from tests.sql.harness import Shop
from tests.sql.shop import breakpoint_of
from tests.waiting import SOON, eventually

#: Where a process that has messages to publish dies.
POINTS = ("outcome written", "before on_commit", "committed", "published", "record completed")


@pytest.mark.worker
@pytest.mark.parametrize("kind", kinds("sqlite"))
def test_a_process_that_is_killed_loses_no_message(
    kind: str, server: RedisServer, create_database: Callable[..., TestDatabase], tmp_path: Path
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
