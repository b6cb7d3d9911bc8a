"""Fixtures: one server of each kind for a session, and a database for each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.engine import make_url

from celery_idempotent import Idempotency
from celery_idempotent.core.flow.thread import Executor
from celery_idempotent.core.key import Key
from celery_idempotent.core.store import commands
from celery_idempotent.sql.outcomes import Claim, Statements
from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import MariaDB, PgBouncer, PostgreSQL, SQLServer
from tests.sql import databases, harness
from tests.sql.databases import KINDS, LIBRARIES, CreateDatabase, TestDatabase, effects
from tests.store.record_harness import Harness


class Shop:
    """A function that writes one effect for each run."""

    def __init__(self, idem: Idempotency, database: TestDatabase, **options: Any) -> None:
        self.idem = idem
        self.database = database
        self.effects, self.rows = database.effects, database.rows
        self.runs = 0
        self.during: Callable[[], Any] = lambda: None
        options = {"transaction": database.engine, **options}
        self.charge = idem.idempotent(key="{order}", name="charge", **options)(self._charge)

    def _charge(self, order: str, amount: int = 1) -> Any:
        self.runs += 1
        insert = effects.insert().values(name=order, pid=0)
        self.idem.current.connection.execute(insert)
        return self.during() or [order, amount, self.runs]


def forget_records(idem: Idempotency) -> None:
    """Removes all records, as FLUSHALL or a failover to an empty replica does."""
    idem.executor.store.client.flushdb()


def poison(executor: Executor, key: Key) -> None:
    """Poisons `key`: it may have one execution, which dies."""
    record = Harness(executor.store, executor.store.client, key)
    record.forget()
    token = record.started(task_id="dead").token
    assert record.execute(commands.poison(key, token, 60_000)).case == "ok"


def hold_row(connection: sa.Connection, prefix: str, key: Any) -> None:
    """Claims the row of `key`, as an execution does."""
    values = Claim.of(key, prefix)._asdict()
    connection.execute(sa.text(Statements(connection.dialect.name).claim), values)


def run_celery(server: RedisServer, database: TestDatabase, library: str, *arguments: str) -> Any:
    """Runs ``celery -A tests.sql.shop …``; returns the process."""
    shop = {"SHOP_REDIS": server.url, "SHOP_DATABASE": database.url, "SHOP_LIBRARY": library}
    return databases.run_module("celery", "-q", "-A", "tests.sql.shop", *arguments, **shop)


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, wait_timeout=20)
    yield engine
    engine.close()


@pytest.fixture
def app(server: RedisServer) -> Iterator[Celery]:
    """An app whose messages are in memory, as those of all apps of a process."""
    app = Celery(broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_redis_url = server.url
    channel = app.connection_for_read().default_channel
    channel.queue_purge("celery")
    yield app
    channel.queue_purge("celery")
    app.close()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with PostgreSQL.start() as server:
        yield server


@pytest.fixture(scope="session")
def pgbouncer(postgresql: PostgreSQL) -> Iterator[PgBouncer]:
    with PgBouncer.start(postgresql) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[SQLServer]:
    with MariaDB.start() as server:
        yield server


@pytest.fixture(scope="session")
def create_database(request: Any, tmp_path_factory: pytest.TempPathFactory) -> CreateDatabase:
    """``create_database("postgresql", "django")``; the kind "pgbouncer" is PostgreSQL behind it."""

    def create(kind: str, library: str = "sqlalchemy") -> TestDatabase:
        if kind == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/shop.db"
        else:
            server = "postgresql" if kind == "pgbouncer" else kind
            url = request.getfixturevalue(server).create_database()
        database = TestDatabase(kind, url, library)
        if kind == "pgbouncer":
            name = make_url(url).database
            database.pooled_url = request.getfixturevalue("pgbouncer").url(name)
        return database

    return create


NewShop = Callable[..., Shop]
MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "postgresql": (pytest.mark.postgresql,),
    "mariadb": (pytest.mark.mariadb,),
    "pgbouncer": (pytest.mark.postgresql, pytest.mark.pgbouncer),
}


def case(*values: str, kept: bool = False) -> Any:
    """Returns values, one of which is a kind, as one parameter; exhaustive unless it is kept."""
    marks = [mark for value in values for mark in MARKS.get(value, ())]
    marks += [] if kept else [pytest.mark.exhaustive]
    return pytest.param(values if len(values) > 1 else values[0], marks=marks, id="-".join(values))


def kinds(*kept: str) -> list[Any]:
    """Returns each kind as a parameter; those that are not in `kept` are marked exhaustive."""
    return [case(kind, kept=kind in kept) for kind in KINDS]


each_kind = pytest.mark.parametrize("database", kinds("sqlite", "postgresql"), indirect=True)
#: For tests that start processes, and those of what does not depend on the database.
each_kind_in_full = pytest.mark.parametrize("database", kinds("sqlite"), indirect=True)
#: The combinations of a library and a kind that ``make test`` runs.
SUFFICIENT = {("sqlalchemy", "postgresql"), ("django", "sqlite")}
#: Django's are first, so that tests of those alone share the workers of all.
LIBRARIES_AND_KINDS = [
    case(library, kind, kept=(library, kind) in SUFFICIENT)
    for library in reversed(LIBRARIES)
    for kind in KINDS
]


@pytest.fixture(scope="module")
def database(request: Any, create_database: CreateDatabase) -> TestDatabase:
    """A database of the kind in the parameter, see `each_kind`."""
    return create_database(request.param)


@pytest.fixture(scope="module")
def start_shop(
    server: RedisServer, create_database: CreateDatabase, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., harness.Shop]:
    """``start_shop("django", "postgresql")``: workers, and a database of their own."""

    def start(library: str, kind: str, **options: Any) -> harness.Shop:
        database, directory = create_database(kind, library), tmp_path_factory.mktemp("shop")
        return harness.Shop(server, database, library, directory, **options)

    return start


@pytest.fixture(scope="module")
def calls(request: Any, server: RedisServer, create_database: CreateDatabase) -> dict[str, Any]:
    """The output of the module that the test names in `CALLS`, with this kind of database."""
    database = create_database(request.param, "django")
    return databases.output_of(request.module.CALLS, database.pooled_url, server.url)


@pytest.fixture
def new_shop(idem: Idempotency, database: TestDatabase) -> NewShop:
    """``new_shop(**options)``: a function whose transaction is of `database`."""
    return lambda **options: Shop(idem, database, **options)


@pytest.fixture
def shop(new_shop: NewShop) -> Shop:
    return new_shop()
