"""Each isolation level: no update is lost, no effect is doubled, whatever is rolled back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_idempotent import ConflictError, Idempotency, StoreUnavailableError
from tests.servers.redis_server import RedisServer
from tests.sql.databases import TestDatabase, effects, new_engine

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
KEYS, CALLS_PER_KEY = 6, 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=[pytest.mark.mariadb, pytest.mark.exhaustive]),
    ],
)
def test_calls_that_update_one_row(
    server: RedisServer, create_database: Callable[..., TestDatabase], kind: str, level: str
) -> None:
    database = create_database(kind)
    engine = new_engine(database.url, isolation_level=level, pool_size=20)
    # Without Redis: all calls of a key meet at its row.
    idem = Idempotency("redis://127.0.0.1:1/0", key_prefix=uuid4().hex, on_store_error="run")
    with engine.begin() as connection:
        connection.execute(effects.insert().values(name="balance", pid=0))
    balance = effects.c.name == "balance"

    @idem.idempotent(name="deposit", transaction=engine)
    def deposit(order: str) -> str:
        connection = idem.current.connection
        if level == "READ COMMITTED":  # it permits lost updates of what was read before
            connection.execute(effects.update().where(balance).values(pid=effects.c.pid + 1))
        else:
            lock = sa.select(effects.c.pid).where(balance)
            lock = lock.with_for_update() if kind == "mariadb" else lock
            old = connection.execute(lock).scalar_one()
            connection.execute(effects.update().where(balance).values(pid=old + 1))
        connection.execute(effects.insert().values(name=order, pid=0))
        return uuid4().hex

    start = threading.Barrier(KEYS * CALLS_PER_KEY)

    def call(order: str) -> tuple[str, str]:
        start.wait(60)
        while True:  # a direct call raises what would requeue a message
            try:
                return order, deposit(order)
            except (sa.exc.DBAPIError, ConflictError, StoreUnavailableError):
                continue

    orders = [uuid4().hex for _ in range(KEYS)]
    with ThreadPoolExecutor(KEYS * CALLS_PER_KEY) as pool:
        results = set(pool.map(call, orders * CALLS_PER_KEY))
    engine.dispose()

    assert len(results) == KEYS, "all calls of a key have its one outcome"
    assert [database.effects(order) for order in orders] == [1] * KEYS
    with database.engine.connect() as connection:
        assert connection.execute(sa.select(effects.c.pid).where(balance)).scalar_one() == KEYS
