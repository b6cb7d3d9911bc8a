"""Each isolation level: no update is lost, no effect is doubled, whatever is rolled back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from celery_idempotent import ConflictError, Idempotency, StoreUnavailableError
from celery_idempotent.core.key import Key
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim
from celery_idempotent.sql.transaction import Transaction
from tests.sql.conftest import case
from tests.sql.databases import CreateDatabase, effects, new_engine

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
KEYS, CALLS_PER_KEY = 6, 3
#: More often than the threshold at which psycopg would prepare statements.
ROUNDS = 8
#: With PgBouncer in transaction mode, as in docs/transactions.md: each transaction may run on
#: another connection of the server.
POOLED = {"connect_args": {"prepare_threshold": None}}


@pytest.mark.parametrize(
    "where",
    [
        *(case("postgresql", level, kept=True) for level in LEVELS),
        *(case("mariadb", level) for level in LEVELS),
        case("pgbouncer", LEVELS[0]),
    ],
)
def test_calls_that_update_one_row(create_database: CreateDatabase, where: tuple[str, str]) -> None:
    kind, level = where
    database = create_database(kind)
    options = {"isolation_level": level} if kind != "pgbouncer" else POOLED
    engine = new_engine(database.pooled_url, pool_size=20, **options)
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
    retried: tuple[type[Exception], ...] = (sa.exc.DBAPIError, ConflictError, StoreUnavailableError)
    if kind == "pgbouncer":  # nothing to retry at this level, and no statement is unknown
        retried = ()

    def call(order: str) -> tuple[str, str]:
        start.wait(60)
        while True:  # a direct call raises what would requeue a message
            try:
                return order, deposit(order)
            except retried:
                continue

    rounds = ROUNDS if kind == "pgbouncer" else 1
    orders = [[uuid4().hex for _ in range(KEYS)] for _ in range(rounds)]
    results: set[tuple[str, str]] = set()
    with ThreadPoolExecutor(KEYS * CALLS_PER_KEY) as pool:
        for each in orders:
            results.update(pool.map(call, each * CALLS_PER_KEY))
    engine.dispose()

    assert len(results) == KEYS * rounds, "all calls of a key have its one outcome"
    assert {database.effects(order) for order, _ in results} == {1}
    with database.engine.connect() as connection:
        total = connection.execute(sa.select(effects.c.pid).where(balance)).scalar_one()
    assert total == KEYS * rounds


@pytest.mark.postgresql
@pytest.mark.pgbouncer
def test_no_setting_of_a_session_remains(create_database: CreateDatabase, order: str) -> None:
    """The claim after an unknown commit limits its wait, and a purge sets its isolation."""
    pooled = create_database("pgbouncer")
    name, level = make_url(pooled.url).database, "repeatable read"
    with pooled.engine.begin() as connection:
        default = f"ALTER DATABASE {name} SET default_transaction_isolation TO '{level}'"
        connection.exec_driver_sql(default)
    engine = new_engine(pooled.pooled_url, **POOLED)
    database = Database(engine)
    database.check()
    for number in range(5):
        claim = Claim.of(Key("charge", f"{order} {number}"), "")
        assert Transaction(database).find(claim) is None
        database.purge(1)

    engine.dispose()
    connections = [engine.connect() for _ in range(3)]
    for setting, expected in (("lock_timeout", "0"), ("transaction_isolation", level)):
        # Each has a transaction open, so each runs on a connection of its own.
        shown = [each.exec_driver_sql(f"SHOW {setting}").scalar_one() for each in connections]
        assert shown == [expected] * 3
    for each in connections:
        each.close()
    engine.dispose()
