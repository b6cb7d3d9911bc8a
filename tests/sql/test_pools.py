"""Redis loses the record of a running call: the next one waits for its row, in every pool.

It does not block other calls, in pools of greenlets either.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.redis_server import RedisServer
from tests.sql.conftest import case
from tests.sql.harness import Shop, StartShop
from tests.waiting import SOON, eventually

CASES = [
    case("sqlalchemy", "prefork", "postgresql", kept=True),
    case("sqlalchemy", "prefork", "mariadb"),
    *(case("django", "prefork", kind) for kind in ("postgresql", "mariadb")),
    *(case("sqlalchemy", "gevent", kind) for kind in ("postgresql", "mariadb")),
    case("sqlalchemy", "eventlet", "mariadb"),
]
pytestmark = [pytest.mark.worker, pytest.mark.parametrize("shop", CASES, indirect=True)]


@pytest.fixture
def shop(request: pytest.FixtureRequest, start_shop: StartShop) -> Iterator[Shop]:
    library, pool, kind = request.param
    with start_shop(library, kind, options=[("--pool", pool)]) as shop:
        yield shop


def test_two_executions_meet_at_the_row(shop: Shop, server: RedisServer, order: str) -> None:
    first = shop.start(order)
    with server.client() as client:
        for name in client.scan_iter("idem:*"):
            client.delete(name)
        second = shop.charge(order)
        eventually(lambda: list(client.scan_iter("idem:*")), "the second one has begun")
    # Its wait would block the greenlet of the first one, too.
    shop.charge(order[::-1]).get(timeout=SOON)
    shop.release(order)

    shop.assert_charged_once(order, first, second)
