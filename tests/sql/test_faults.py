"""Faults of the database while workers run: lost replies, restarts, outages, deadlocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import SQLServer
from tests.sql.conftest import LIBRARIES_AND_KINDS
from tests.sql.databases import CreateDatabase, TestDatabase, effects
from tests.sql.harness import Shop
from tests.waiting import SOON, eventually

SERVERS = [each for each in LIBRARIES_AND_KINDS if "sqlite" not in each.values[0]]
pytestmark = [pytest.mark.worker, pytest.mark.parametrize("where", SERVERS, scope="module")]


@pytest.fixture(scope="module")
def kind(where: tuple[str, str]) -> str:
    return where[1]


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
    where: tuple[str, str],
    server: RedisServer,
    proxy: Proxy,
    create_database: CreateDatabase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    library, kind = where
    database = create_database(kind, library)
    url = make_url(database.url).set(port=proxy.port).render_as_string()
    directory: Path = tmp_path_factory.mktemp("shop")
    with Shop(server, database, library, directory, database_url=url) as shop:
        yield shop


@pytest.fixture
def commit(kind: str) -> str:
    """What the request of a commit contains; MariaDB's also has ``SET AUTOCOMMIT``."""
    return "COMMIT" if kind == "postgresql" else "\x03COMMIT"


class TestCommit:
    @pytest.mark.parametrize(("fault", "starts"), [("lose_reply", 1), ("lose_request", 2)])
    def test_it_or_its_reply_is_lost(
        self, shop: Shop, proxy: Proxy, order: str, commit: str, fault: str, starts: int
    ) -> None:
        getattr(proxy, fault)(to=commit)
        # It runs again unless it was committed.
        shop.assert_charged_once(order, shop.charge(order), starts=starts)
        assert proxy.pending == 0

    @pytest.mark.parametrize("fault", ["lose_reply", "lose_request"])
    def test_and_the_database_is_unavailable_afterwards(
        self, shop: Shop, proxy: Proxy, order: str, commit: str, fault: str
    ) -> None:
        result = shop.start(order)
        getattr(proxy, fault)(to=commit)
        shop.release(order)
        eventually(lambda: proxy.pending == 0, "the commit is lost")
        proxy.refuse()
        result.state  # noqa: B018 - the message may be put back by now
        proxy.heal()
        shop.assert_charged_once(order, result, starts=None)


class TestOutage:
    def test_at_the_begin(self, shop: Shop, proxy: Proxy, order: str) -> None:
        proxy.refuse()
        result = shop.charge(order)
        shop.wait_for_log(f"task {result.id} is put back")
        proxy.heal()

        shop.assert_charged_once(order, result)

    @pytest.mark.exhaustive
    def test_during_the_body(self, shop: Shop, database_server: SQLServer, order: str) -> None:
        result = shop.start(order)
        database_server.kill()
        database_server.launch()
        shop.release(order)

        shop.assert_charged_once(order, result, starts=2)


#: The server's connections with an open transaction, other than the one that asks.
OPEN_TRANSACTIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND xact_start IS NOT NULL AND pid <> pg_backend_pid()",
    "mariadb": "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx"
    " WHERE trx_mysql_thread_id <> CONNECTION_ID()",
}


def test_an_idle_transaction_is_ended_by_the_server(
    shop: Shop, database_server: SQLServer, kind: str, order: str
) -> None:
    """PostgreSQL's ``idle_in_transaction_session_timeout``; MariaDB's sends no error."""
    if kind == "postgresql":
        set_idle_timeout(database_server, "500")
    result = shop.start(order)
    if kind == "mariadb":
        for number in eventually(lambda: query(shop.database, OPEN_TRANSACTIONS[kind])):
            database_server.execute(f"KILL {number}")
            # The list of transactions is not updated while it is read every 0.1 s.
            connection = f"SELECT id FROM information_schema.processlist WHERE id = {number}"
            eventually(lambda: not query(shop.database, connection), "it is ended")  # noqa: B023
    else:
        eventually(lambda: not query(shop.database, OPEN_TRANSACTIONS[kind]), "it is ended")
        set_idle_timeout(database_server, "DEFAULT")
    shop.release(order)

    shop.assert_charged_once(order, result, starts=None)
    assert shop.starts(order) > 1


def query(database: TestDatabase, statement: str) -> list[int]:
    """Returns a column, in a transaction of its own: PostgreSQL reads its activity once in each."""
    with database.engine.connect() as connection:
        return list(connection.execute(text(statement)).scalars())


def set_idle_timeout(server: SQLServer, milliseconds: str) -> None:
    """Sets it for every session, from its next statement on."""
    server.execute(f"ALTER SYSTEM SET idle_in_transaction_session_timeout = {milliseconds}")
    server.execute("SELECT pg_reload_conf()")


@pytest.mark.exhaustive
def test_a_deadlock_is_put_back(shop: Shop, database_server: SQLServer, order: str) -> None:
    other = order[::-1]
    pairs = ((order, other), (other, order))
    with shop.database.engine.begin() as connection:
        for name in (order, other):
            connection.execute(effects.insert().values(name=name, pid=0))
    results = [shop.app.send_task("sql_shop.transfer", names) for names in pairs]

    assert [result.get(timeout=SOON) for result in results] == ["transferred"] * 2
    starts = shop.starts(order) + shop.starts(other)
    assert starts == 3, "one of them has run again"
    for names in pairs:
        assert shop.database.effects("-".join(name[:8] for name in names)) == 1
