"""Functions with a transaction, in this process, on each kind of database by SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_idempotent import Idempotency, StoreUnavailableError, TransactionError
from celery_idempotent.errors import KeyReusedError, ResultNotStoredError, SettingsError
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import NewShop, Shop, each_kind, forget_records
from tests.sql.databases import TestDatabase, effects, new_engine
from tests.waiting import eventually

pytestmark = each_kind


class TestOutcomes:
    def test_the_outcome_survives_the_loss_of_redis(self, shop: Shop, order: str) -> None:
        first = shop.charge(order)
        forget_records(shop.idem)

        assert shop.charge(order) == first
        assert shop.charge(order) == first, "from Redis, which has it again"
        assert (shop.runs, shop.effects(order)) == (1, 1)

    def test_an_error_rolls_back(self, shop: Shop, order: str) -> None:
        shop.during = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            shop.charge(order)
        assert shop.effects(order) == 0
        assert shop.rows(shop.charge.idempotency_key_of(order)) == []

    def test_a_replayed_error_has_a_row_and_no_effects(self, new_shop: NewShop, order: str) -> None:
        shop = new_shop(replay_errors=(ZeroDivisionError,))
        shop.during = lambda: 1 / 0
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="division by zero"):
                shop.charge(order)
            forget_records(shop.idem)
        assert (shop.runs, shop.effects(order)) == (1, 0)

    def test_other_arguments_are_refused_without_redis_too(self, shop: Shop, order: str) -> None:
        shop.charge(order, 1)
        forget_records(shop.idem)

        with pytest.raises(KeyReusedError):
            shop.charge(order, 2)
        assert shop.charge(order, 1)[1] == 1

    @pytest.mark.parametrize(
        "options", [{"store_result": False}, {"max_result_size": 100}], ids=str
    )
    def test_a_result_that_is_not_stored(self, new_shop: NewShop, order: str, options: Any) -> None:
        shop = new_shop(**options)
        shop.during = lambda: "x" * 1000
        shop.charge(order)
        forget_records(shop.idem)

        with pytest.raises(ResultNotStoredError):
            shop.charge(order)
        assert shop.effects(order) == 1

    def test_results_above_64_kib(self, shop: Shop, order: str) -> None:
        shop.during = lambda: "x" * 200_000
        shop.charge(order)
        forget_records(shop.idem)

        assert shop.charge(order) == "x" * 200_000

    def test_the_row_expires_with_the_record(self, new_shop: NewShop, order: str) -> None:
        shop = new_shop(result_ttl=1)
        shop.charge(order)
        eventually(lambda: shop.charge(order)[2] == 2, "the row has expired")
        assert shop.effects(order) == 2
        assert len(shop.rows(shop.charge.idempotency_key_of(order))) == 1, "taken over"


def test_rows_are_encrypted(server: RedisServer, database: TestDatabase, order: str) -> None:
    cryptography = pytest.importorskip("cryptography.fernet")
    keys = (cryptography.Fernet.generate_key(),)
    idem = Idempotency(server.url, key_prefix=uuid4().hex, encryption_keys=keys)
    shop = Shop(idem, database)
    shop.during = lambda: "a secret"
    shop.charge(order)
    forget_records(shop.idem)

    assert shop.charge(order) == "a secret"
    (row,) = database.rows(shop.charge.idempotency_key_of(order))
    assert b"a secret" not in bytes(row.body)
    idem.close()


def controlled_by_session(connection: sa.Connection) -> None:
    with Session(connection, join_transaction_mode="control_fully") as session:
        session.execute(effects.insert().values(name="session", pid=0))
        session.commit()
        session.execute(effects.insert().values(name="session", pid=0))
        session.commit()


#: How a body may try to end its transaction.
ENDS: dict[str, Callable[[sa.Connection], Any]] = {
    "commit": lambda connection: connection.commit(),
    "rollback": lambda connection: connection.rollback(),
    "close": lambda connection: connection.close(),
    "invalidate": lambda connection: connection.invalidate(),
    "begin": lambda connection: connection.begin(),
    "commit of the root": lambda connection: connection.get_transaction().commit(),  # type: ignore[union-attr]
    "rollback of the savepoint": lambda connection: connection.get_nested_transaction().rollback(),  # type: ignore[union-attr]
    "session": controlled_by_session,
    "autocommit": lambda connection: connection.execution_options(isolation_level="AUTOCOMMIT"),
}
#: How it does so behind SQLAlchemy's back.
UNSEEN_ENDS: dict[str, Callable[[sa.Connection], Any]] = {
    "driver": lambda connection: connection.connection.commit(),
    "SQL": lambda connection: connection.exec_driver_sql("COMMIT"),
    "with": lambda connection: connection.connection.driver_connection.__exit__(None, None, None),  # type: ignore[union-attr]
}


class TestBodyThatEndsItsTransaction:
    @pytest.mark.parametrize("end", ENDS)
    @pytest.mark.parametrize("goes_on", [False, True])
    def test_is_refused_before_anything_is_committed(
        self, shop: Shop, order: str, end: str, goes_on: bool
    ) -> None:
        def during() -> str:
            connection = shop.idem.current.connection
            if not goes_on:
                ENDS[end](connection)
                return "done"
            for step in (ENDS[end], insert, ENDS["rollback"], insert, ENDS["commit"]):
                with suppress(Exception):
                    step(connection)
            return "done"

        def insert(connection: sa.Connection) -> None:
            connection.execute(effects.insert().values(name=order, pid=1))

        shop.during = during
        for _ in range(2):
            with pytest.raises((TransactionError, sa.exc.InvalidRequestError)):
                shop.charge(order)
        assert (shop.runs, shop.effects(order), shop.effects("session")) == (2, 0, 0)
        assert shop.rows(shop.charge.idempotency_key_of(order)) == []

    @pytest.mark.parametrize("end", UNSEEN_ENDS)
    def test_behind_sqlalchemy_it_blocks_the_key(self, shop: Shop, order: str, end: str) -> None:
        """Its effects are committed, so it must not run again by itself."""
        if (shop.database.kind, end) == ("mariadb", "with"):
            pytest.skip("it closes the connection")
        shop.during = lambda: UNSEEN_ENDS[end](shop.idem.current.connection)
        with pytest.raises((TransactionError, sa.exc.OperationalError)):
            shop.charge(order)
        with pytest.raises(TransactionError, match="without an outcome"):
            shop.charge(order)
        assert (shop.runs, shop.effects(order)) == (1, 1)

    def test_savepoints_are_fine(self, shop: Shop, order: str) -> None:
        def during() -> str:
            with shop.idem.current.connection.begin_nested() as savepoint:
                shop.idem.current.connection.execute(effects.insert().values(name=order, pid=1))
                savepoint.rollback()
            return "done"

        shop.during = during
        assert shop.charge(order) == "done"
        assert shop.effects(order) == 1

    @pytest.mark.parametrize("closes", [True, False])
    def test_a_session_returns_to_its_savepoint(self, shop: Shop, order: str, closes: bool) -> None:
        def during() -> str:
            connection = shop.idem.current.connection
            session = Session(bind=connection)
            id_ = connection.scalar(sa.select(effects.c.id).where(effects.c.name == order))
            with pytest.raises(sa.exc.IntegrityError):
                session.execute(effects.insert().values(id=id_, name=order, pid=1))
            session.rollback()
            session.execute(effects.insert().values(name=order, pid=1))
            session.commit()
            session.scalar(sa.select(effects.c.id))
            if closes:
                session.close()
            return "done"

        shop.during = during
        assert shop.charge(order) == shop.charge(order) == "done"
        assert (shop.runs, shop.effects(order)) == (1, 2)


class TestConfiguration:
    def test_autocommit_is_refused(self, database: TestDatabase) -> None:
        from celery_idempotent.sql.database import Database

        engine = new_engine(database.url, isolation_level="AUTOCOMMIT")
        with pytest.raises(SettingsError, match="does not roll back"):
            Database(engine).check()
        engine.dispose()

    def test_a_missing_table_is_named_with_its_remedy(
        self, idem: Idempotency, create_database: Any, database: TestDatabase, order: str
    ) -> None:
        from celery_idempotent.contrib.sqlalchemy import metadata
        from celery_idempotent.sql.database import Database

        empty = create_database(database.kind)
        metadata.drop_all(empty.engine)
        with pytest.raises(SettingsError, match=r"celery_idempotency_outcomes.*metadata"):
            Database(empty.engine).check()
        shop = Shop(idem, empty)
        with pytest.raises(StoreUnavailableError, match="create_all"):
            shop.charge(order)
        assert shop.runs == 0

    def test_async_functions_are_refused(self, idem: Idempotency, database: TestDatabase) -> None:
        async def charge() -> None: ...

        with pytest.raises(SettingsError, match="blocking function"):
            idem.idempotent(name="charge", transaction=database.engine)(charge)

    def test_a_disabled_function_has_a_transaction(self, new_shop: NewShop, order: str) -> None:
        shop = new_shop(enabled=False)
        shop.charge(order)
        shop.during = lambda: shop.idem.current.step("fail", lambda: 1 / 0, transaction=True)
        with pytest.raises(ZeroDivisionError):
            shop.charge(order)

    def test_a_disabled_block_has_a_transaction(self, database: TestDatabase, order: str) -> None:
        idem = Idempotency("redis://127.0.0.1:1", enabled=False, transaction=database.engine)

        def charge(fails: bool) -> None:
            with idem.execution(order) as block:
                block.connection.execute(effects.insert().values(name=order, pid=0))
                block.complete(1 / (not fails))

        charge(False)
        with pytest.raises(ZeroDivisionError):
            charge(True)
        assert database.effects(order) == 1
        with pytest.raises(SettingsError, match="a batch has no idempotency_transaction"):
            idem.begin_many([order])


def count(engine: sa.Engine, work: Callable[[], Any]) -> dict[str, int]:
    """Returns how often each event has happened during `work`."""
    counts = dict.fromkeys(("before_cursor_execute", "begin", "commit", "rollback"), 0)

    def listener(name: str, *_: Any) -> None:
        counts[name] += 1

    listeners = [(engine, name, partial(listener, name)) for name in counts]
    for each in listeners:
        sa.event.listen(*each)
    work()
    for each in listeners:
        sa.event.remove(*each)
    return counts


def test_four_statements_more(server: RedisServer, database: TestDatabase) -> None:
    engine = new_engine(database.url)
    idem = Idempotency(server.url, key_prefix=uuid4().hex)
    insert = effects.insert().values(name="one", pid=0)

    def plain() -> None:
        with engine.begin() as connection:
            connection.execute(insert)

    @idem.idempotent(name="charge", transaction=engine)
    def charge(order: str) -> None:
        idem.current.connection.execute(insert)

    plain()  # connects
    expected = count(engine, plain)
    order = uuid4().hex
    run = count(engine, lambda: charge(order))
    replay = count(engine, lambda: charge(order))
    idem.close()
    engine.dispose()

    statements = "before_cursor_execute"
    assert run == {**expected, statements: expected[statements] + 4}
    assert set(replay.values()) == {0}, "it is answered from Redis"
