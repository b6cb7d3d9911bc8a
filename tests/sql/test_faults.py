"""Faults of the database while workers run: lost replies, restarts, outages; and lost records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.servers.sql_server import SQLServer
from tests.sql.conftest import MARKS, SUFFICIENT
from tests.sql.databases import LIBRARIES, TestDatabase, effects
from tests.sql.harness import Shop
from tests.waiting import SOON, eventually

pytestmark = [
    pytest.mark.worker,
    pytest.mark.parametrize(
        ("kind", "library"),
        [
            pytest.param(
                kind,
                library,
                marks=[
                    *MARKS[kind],
                    *([] if (library, kind) in SUFFICIENT else [pytest.mark.exhaustive]),
                ],
                id=f"{library}-{kind}",
            )
            for kind in ("postgresql", "mariadb")
            for library in LIBRARIES
        ],
        scope="module",
    ),
]


@pytest.fixture(scope="module")
def database_server(request: pytest.FixtureRequest, kind: str) -> SQLServer:
    found: SQLServer = request.getfixturevalue(kind)
    return found


@pytest.fixture(scope="module")
def proxy(database_server: SQLServer) -> Iterator[Proxy]:
    with Proxy(database_server.url("any").replace("+psycopg", "").replace("+pymysql", "")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shop(
    kind: str,
    library: str,
    server: RedisServer,
    proxy: Proxy,
    create_database: Callable[..., TestDatabase],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    database = create_database(kind, library)
    url = make_url(database.url).set(port=proxy.port).render_as_string()
    directory: Path = tmp_path_factory.mktemp("shop")
    with Shop(server, database, library, directory, database_url=url) as shop:
        yield shop


@pytest.fixture
def commit(kind: str) -> str:
    """What the request of a commit contains; MariaDB's also has ``SET AUTOCOMMIT``."""
    return "COMMIT" if kind == "postgresql" else "\x03COMMIT"


def assert_charged_once(shop: Shop, order: str, receipt: str) -> None:
    assert shop.database.effects(order) == 1
    assert shop.charge(order).get(timeout=SOON) == receipt


class TestCommit:
    def test_its_reply_is_lost(self, shop: Shop, proxy: Proxy, order: str, commit: str) -> None:
        proxy.lose_reply(to=commit)
        receipt = shop.charge(order).get(timeout=SOON)

        assert proxy.pending == 0
        assert shop.starts(order) == 1, "it was committed"
        assert_charged_once(shop, order, receipt)

    def test_it_is_lost_itself(self, shop: Shop, proxy: Proxy, order: str, commit: str) -> None:
        proxy.lose_request(to=commit)
        receipt = shop.charge(order).get(timeout=SOON)

        assert proxy.pending == 0
        assert shop.starts(order) == 2, "it was not committed"
        assert_charged_once(shop, order, receipt)

    @pytest.mark.parametrize("fault", ["lose_reply", "lose_request"])
    def test_and_the_database_is_unavailable_afterwards(
        self, shop: Shop, proxy: Proxy, order: str, commit: str, fault: str
    ) -> None:
        shop.hold(order)
        result = shop.charge(order)
        shop.wait_for_start(order)
        getattr(proxy, fault)(to=commit)
        shop.release(order)
        eventually(lambda: proxy.pending == 0, "the commit is lost")
        proxy.refuse()
        result.state  # noqa: B018 - the message may be requeued by now
        proxy.heal()
        assert_charged_once(shop, order, result.get(timeout=SOON))


class TestOutage:
    def test_at_the_begin(self, shop: Shop, proxy: Proxy, order: str) -> None:
        proxy.refuse()
        result = shop.charge(order)
        shop.wait_for_log(f"task {result.id} is requeued")
        proxy.heal()

        assert_charged_once(shop, order, result.get(timeout=SOON))
        assert shop.starts(order) == 1

    def test_during_the_body(self, shop: Shop, database_server: SQLServer, order: str) -> None:
        shop.hold(order)
        result = shop.charge(order)
        shop.wait_for_start(order)
        database_server.kill()
        database_server.launch()
        shop.release(order)

        assert_charged_once(shop, order, result.get(timeout=SOON))
        assert shop.starts(order) == 2


class TestLostRecords:
    def test_two_executions_meet_at_the_row(
        self, shop: Shop, server: RedisServer, order: str
    ) -> None:
        shop.hold(order)
        first = shop.charge(order)
        shop.wait_for_start(order)
        with server.client() as client:
            for name in client.scan_iter("idem:*"):
                client.delete(name)
            second = shop.charge(order)
            eventually(lambda: list(client.scan_iter("idem:*")), "the second one has begun")
        shop.release(order)

        assert first.get(timeout=SOON) == second.get(timeout=SOON)
        assert shop.database.effects(order) == 1
        assert shop.starts(order) == 1


class TestDeadlock:
    def test_is_requeued(self, shop: Shop, database_server: SQLServer, order: str) -> None:
        other = order[::-1]
        with shop.database.engine.begin() as connection:
            for name in (order, other):
                connection.execute(effects.insert().values(name=name, pid=0))
        results = [
            shop.app.send_task("sql_shop.transfer", names)
            for names in ((order, other), (other, order))
        ]

        assert [result.get(timeout=SOON) for result in results] == ["transferred"] * 2
        starts = shop.starts(order) + shop.starts(other)
        assert starts == 3, "one of them has run again"
        for names in ((order, other), (other, order)):
            assert shop.database.effects("-".join(name[:8] for name in names)) == 1
