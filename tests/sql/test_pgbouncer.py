"""PgBouncer in transaction mode: each transaction may run on another connection of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from celery_idempotent import Idempotency, TransactionError
from celery_idempotent.sql.database import Database
from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import PgBouncer
from tests.sql.databases import TestDatabase, effects, new_engine
from tests.waiting import SOON

pytestmark = [pytest.mark.postgresql, pytest.mark.pgbouncer]

KEYS, CALLS_PER_KEY, ROUNDS = 4, 3, 8


@pytest.fixture(scope="module")
def database(create_database: Callable[..., TestDatabase]) -> TestDatabase:
    return create_database("postgresql")


@pytest.fixture(scope="module")
def engine(database: TestDatabase, pgbouncer: PgBouncer) -> Iterator[sa.Engine]:
    """As in docs/transactions.md."""
    name = make_url(database.url).database
    assert name is not None
    engine = new_engine(
        pgbouncer.url(name),
        connect_args={"prepare_threshold": None},
        pool_size=KEYS * CALLS_PER_KEY,
    )
    Database(engine).check()
    yield engine
    engine.dispose()


@pytest.mark.exhaustive
def test_calls_of_one_key_meet_at_its_row(database: TestDatabase, engine: sa.Engine) -> None:
    """More often than the threshold at which psycopg would prepare statements."""
    away = Idempotency("redis://127.0.0.1:1/0", key_prefix=uuid4().hex, on_store_error="run")
    start = threading.Barrier(KEYS * CALLS_PER_KEY)

    @away.idempotent(name="charge", transaction=engine)
    def charge(order: str) -> str:
        away.current.connection.execute(effects.insert().values(name=order, pid=0))
        return uuid4().hex

    def call(order: str) -> set[str]:
        receipts = set()
        for number in range(ROUNDS):
            start.wait(SOON)
            receipts.add(charge(f"{order[:30]}-{number}"))
        for _ in range(ROUNDS):
            charge(uuid4().hex)
        return receipts

    orders = [uuid4().hex for _ in range(KEYS)]
    with ThreadPoolExecutor(KEYS * CALLS_PER_KEY) as pool:
        receipts = list(pool.map(call, orders * CALLS_PER_KEY))

    assert receipts[:KEYS] == receipts[KEYS : 2 * KEYS] == receipts[2 * KEYS :]
    for order in orders:
        names = [f"{order[:30]}-{number}" for number in range(ROUNDS)]
        assert [database.effects(name) for name in names] == [1] * ROUNDS


def test_no_setting_of_a_session_remains(
    server: RedisServer, engine: sa.Engine, order: str
) -> None:
    """The claim after an unknown commit limits its wait, and a purge sets its isolation."""
    idem = Idempotency(server.url, key_prefix=uuid4().hex)

    @idem.idempotent(name="charge", transaction=engine)
    def charge(order: str) -> None:
        idem.current.connection.commit()

    for number in range(5):
        with pytest.raises(TransactionError):
            charge(f"{order} {number}")
        Database(engine).purge(1)
    idem.close()

    engine.dispose()
    connections = [engine.connect() for _ in range(3)]
    for setting, expected in (("lock_timeout", "0"), ("transaction_isolation", "read committed")):
        # Each has a transaction open, so each runs on a connection of its own.
        shown = [each.exec_driver_sql(f"SHOW {setting}").scalar_one() for each in connections]
        assert shown == [expected] * 3
    for each in connections:
        each.close()
