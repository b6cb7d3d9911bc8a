"""Pools of greenlets: an execution that waits for a row does not block the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers.redis_server import RedisServer
from tests.sql.harness import Shop
from tests.waiting import SOON, eventually

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.worker,
    pytest.mark.parametrize(
        "shop",
        [
            pytest.param(("gevent", "postgresql"), marks=pytest.mark.postgresql),
            pytest.param(("gevent", "mariadb"), marks=pytest.mark.mariadb),
            pytest.param(("eventlet", "mariadb"), marks=pytest.mark.mariadb),
        ],
        indirect=True,
        ids="-".join,
    ),
]


@pytest.fixture
def shop(request: pytest.FixtureRequest, start_shop: Callable[..., Shop]) -> Iterator[Shop]:
    pool, kind = request.param
    with start_shop("sqlalchemy", kind, options=[("--pool", pool)]) as shop:
        yield shop


def test_two_executions_meet_at_the_row(shop: Shop, server: RedisServer, order: str) -> None:
    shop.hold(order)
    first = shop.charge(order)
    shop.wait_for_start(order)
    with server.client() as client:
        for name in client.scan_iter("idem:*"):
            client.delete(name)
        second = shop.charge(order)
        eventually(lambda: list(client.scan_iter("idem:*")), "the second one has begun")
    # Its wait would block the greenlet of the first one, too.
    shop.charge(order[::-1]).get(timeout=SOON)
    shop.release(order)

    assert first.get(timeout=SOON) == second.get(timeout=SOON)
    assert shop.database.effects(order) == 1
    assert shop.starts(order) == 1
