"""Functions with a transaction, in this process, on each kind of database by SQLAlchemy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_idempotent import (
    Decision,
    Idempotency,
    KeyReusedError,
    ResultNotStoredError,
    StoreUnavailableError,
    TransactionError,
)
from celery_idempotent.errors import SettingsError
from celery_idempotent.testing.server import RedisServer
from tests.sql.conftest import each_kind
from tests.sql.databases import TestDatabase, effects, new_engine
from tests.waiting import SOON, eventually

pytestmark = each_kind


@pytest.fixture
def idem(server: RedisServer) -> Iterator[Idempotency]:
    engine = Idempotency(server.url, key_prefix=uuid4().hex, wait_timeout=20)
    yield engine
    engine.close()


class Shop:
    """A function that writes one effect for each run."""

    def __init__(self, idem: Idempotency, database: TestDatabase, **options: Any) -> None:
        self.idem = idem
        self.runs = 0
        self.during: Callable[[], Any] = lambda: None
        options = {"transaction": database.engine, **options}
        self.charge = idem.idempotent(key="{order}", name="charge", **options)(self._charge)

    def _charge(self, order: str, amount: int = 1) -> Any:
        self.runs += 1
        insert = effects.insert().values(name=order, pid=0)
        self.idem.current.connection.execute(insert)
        return self.during() or [order, amount, self.runs]


@pytest.fixture
def shop(idem: Idempotency, database: TestDatabase) -> Shop:
    return Shop(idem, database)


def forget_redis(shop: Shop) -> None:
    """Removes all records, as FLUSHALL or a failover to an empty replica does."""
    shop.idem.executor.store.client.flushdb()


class TestOutcomes:
    def test_the_outcome_survives_the_loss_of_redis(
        self, shop: Shop, database: TestDatabase, order: str
    ) -> None:
        first = shop.charge(order)
        forget_redis(shop)

        assert shop.charge(order) == first
        assert shop.charge(order) == first, "from Redis, which has it again"
        assert (shop.runs, database.effects(order)) == (1, 1)

    def test_an_error_rolls_back(self, shop: Shop, database: TestDatabase, order: str) -> None:
        shop.during = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            shop.charge(order)
        assert database.effects(order) == 0
        assert database.rows(shop.charge.idempotency_key_of(order)) == []

    def test_a_replayed_error_has_a_row_and_no_effects(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        shop = Shop(idem, database, replay_errors=(ZeroDivisionError,))
        shop.during = lambda: 1 / 0
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="division by zero"):
                shop.charge(order)
            forget_redis(shop)
        assert (shop.runs, database.effects(order)) == (1, 0)

    def test_other_arguments_are_refused_without_redis_too(self, shop: Shop, order: str) -> None:
        shop.charge(order, 1)
        forget_redis(shop)

        with pytest.raises(KeyReusedError):
            shop.charge(order, 2)
        assert shop.charge(order, 1)[1] == 1

    def test_a_result_that_is_not_stored(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        shop = Shop(idem, database, store_result=False)
        shop.charge(order)
        forget_redis(shop)

        with pytest.raises(ResultNotStoredError):
            shop.charge(order)
        assert database.effects(order) == 1

    def test_a_result_that_is_too_large(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        shop = Shop(idem, database, max_result_size=100)
        shop.during = lambda: "x" * 1000
        shop.charge(order)
        forget_redis(shop)

        with pytest.raises(ResultNotStoredError):
            shop.charge(order)
        assert database.effects(order) == 1

    def test_results_above_64_kib(self, shop: Shop, order: str) -> None:
        shop.during = lambda: "x" * 200_000
        shop.charge(order)
        forget_redis(shop)

        assert shop.charge(order) == "x" * 200_000

    def test_the_row_expires_with_the_record(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        shop = Shop(idem, database, result_ttl=1)
        shop.charge(order)
        eventually(lambda: shop.charge(order)[2] == 2, "the row has expired")
        assert database.effects(order) == 2
        assert len(database.rows(shop.charge.idempotency_key_of(order))) == 1, "taken over"

    def test_forget(self, shop: Shop, database: TestDatabase, order: str) -> None:
        shop.charge(order)
        key = shop.charge.idempotency_key_of(order)
        store = shop.idem.executor
        assert store.forget(key, database=shop_database(shop)) == "ok"
        assert store.forget(key, database=shop_database(shop)) == "absent"
        shop.charge(order)
        assert database.effects(order) == 2


def shop_database(shop: Shop) -> Any:
    (cell,) = (c for c in shop.charge.__closure__ if hasattr(c.cell_contents, "transaction"))
    return cell.cell_contents.transaction


class TestEncryption:
    def test_rows_are_encrypted(
        self, server: RedisServer, database: TestDatabase, order: str
    ) -> None:
        cryptography = pytest.importorskip("cryptography.fernet")
        keys = (cryptography.Fernet.generate_key(),)
        idem = Idempotency(server.url, key_prefix=uuid4().hex, encryption_keys=keys)
        shop = Shop(idem, database)
        shop.during = lambda: "a secret"
        shop.charge(order)
        forget_redis(shop)

        assert shop.charge(order) == "a secret"
        (row,) = database.rows(shop.charge.idempotency_key_of(order))
        assert b"a secret" not in bytes(row.body)
        idem.close()


class TestTwoExecutions:
    def test_the_second_waits_and_gets_the_outcome_of_the_first(
        self, shop: Shop, database: TestDatabase, order: str
    ) -> None:
        """Redis has lost the record while the first one runs."""
        second: list[Any] = []
        thread = threading.Thread(target=lambda: second.append(shop.charge(order)))

        def during() -> Any:
            if shop.runs == 1:
                forget_redis(shop)
                shop.during = lambda: None
                thread.start()
                # It has begun, and waits in the database.
                store = shop.idem.executor.store
                eventually(lambda: store.client.dbsize(), "the second one has begun")
            return "the first"

        shop.during = during
        assert shop.charge(order) == "the first"
        thread.join(SOON)
        assert second == ["the first"]
        assert (shop.runs, database.effects(order)) == (1, 1)

    def test_all_waiters_go_on_after_a_rollback(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        """Without Redis, the row alone protects; on MariaDB, all waiters but one deadlock."""
        engine = new_engine(database.url, pool_size=10)
        shop = Shop(idem, database, transaction=engine, on_store_error="run")
        unavailable = Idempotency("redis://127.0.0.1:1/0", key_prefix=uuid4().hex)
        shops = [
            Shop(unavailable, database, transaction=engine, on_store_error="run") for _ in range(6)
        ]
        results: list[Any] = []
        started = threading.Barrier(7)

        def charge(each: Shop) -> None:
            started.wait(SOON)
            results.append(each.charge(order))

        threads = [threading.Thread(target=charge, args=(each,)) for each in shops]
        for thread in threads:
            thread.start()
        with engine.begin() as connection:
            # Holds the row, then rolls back.
            key = shop.charge.idempotency_key_of(order)
            hold_row(connection, unavailable.executor.store.config.prefix, key)
            started.wait(SOON)
            connection.rollback()
        for thread in threads:
            thread.join(SOON)
        engine.dispose()
        assert len(results) == 6
        assert all(result == results[0] for result in results)
        assert database.effects(order) == 1
        assert sum(each.runs for each in shops) == 1


def hold_row(connection: sa.Connection, prefix: str, key: Any) -> None:
    """Claims the row of `key`, as an execution does."""
    from celery_idempotent.sql.outcomes import Claim, statements

    values = Claim(key, prefix, "a task", "a worker", 1, 1).values
    connection.execute(sa.text(statements(connection.dialect.name).claim), values)


class TestBodyThatEndsItsTransaction:
    @pytest.mark.parametrize("end", ["commit", "rollback", "close"])
    def test_fails(self, shop: Shop, order: str, end: str) -> None:
        shop.during = lambda: getattr(shop.idem.current.connection, end)()
        with pytest.raises(TransactionError, match="savepoint"):
            shop.charge(order)

    def test_after_a_commit_the_key_is_refused(self, shop: Shop, order: str) -> None:
        """Its effects are committed, so it must not run again by itself."""
        shop.during = lambda: shop.idem.current.connection.commit()
        for _ in range(2):
            with pytest.raises(TransactionError):
                shop.charge(order)
        assert shop.runs == 1

    def test_savepoints_are_fine(self, shop: Shop, database: TestDatabase, order: str) -> None:
        def during() -> str:
            with shop.idem.current.connection.begin_nested() as savepoint:
                shop.idem.current.connection.execute(effects.insert().values(name=order, pid=1))
                savepoint.rollback()
            return "done"

        shop.during = during
        assert shop.charge(order) == "done"
        assert database.effects(order) == 1

    def test_sessions_of_the_orm(self, shop: Shop, database: TestDatabase, order: str) -> None:
        from sqlalchemy.orm import Session

        def during() -> str:
            with Session(bind=shop.idem.current.connection) as session:
                session.execute(effects.insert().values(name=order, pid=1))
                session.commit()
            return "done"

        shop.during = during
        assert shop.charge(order) == "done"
        assert database.effects(order) == 2


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

    def test_coroutine_functions_are_refused(
        self, idem: Idempotency, database: TestDatabase
    ) -> None:
        async def charge() -> None: ...

        with pytest.raises(SettingsError, match="blocking function"):
            idem.idempotent(transaction=database.engine)(charge)

    def test_a_disabled_function_has_a_transaction(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        shop = Shop(idem, database, enabled=False)
        shop.charge(order)
        shop.during = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            shop.charge(order)
        assert database.effects(order) == 1


class TestSteps:
    def test_a_step_is_committed_with_its_value(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        def book(fail: bool) -> str:
            idem.current.connection.execute(effects.insert().values(name=order, pid=0))
            if fail:
                raise ValueError
            return uuid4().hex

        values: list[str] = []

        @idem.idempotent(key="{order}", name="ship")
        def ship(order: str, ends: Callable[[], Any]) -> str:
            step = idem.current.step
            with pytest.raises(ValueError):  # noqa: PT011
                step("fails", book, True, transaction=database.engine)
            values.append(step("book", book, False, transaction=database.engine))
            forget_records(idem)
            ends()
            return values[-1]

        with pytest.raises(ZeroDivisionError):
            ship(order, lambda: 1 / 0)
        assert ship(order, lambda: None) == values[0], "it did not run again, even without Redis"
        assert values == [values[0]] * 2
        assert database.effects(order) == 1
        assert idem.executor.forget(ship.idempotency_key_of(order, len), database=db(database))

    def test_a_step_of_the_body_s_transaction_is_rolled_back_with_it(
        self, shop: Shop, database: TestDatabase, order: str
    ) -> None:
        runs: list[int] = []

        def during() -> int:
            value = shop.idem.current.step("count", lambda: runs.append(1), transaction=True)
            assert value is None
            return 1 // (len(runs) - 1)

        shop.during = during
        with pytest.raises(ZeroDivisionError):
            shop.charge(order)
        shop.charge(order)
        assert len(runs) == 2

    def test_a_step_needs_a_database_of_its_own(
        self, shop: Shop, database: TestDatabase, idem: Idempotency, order: str
    ) -> None:
        shop.during = lambda: idem.current.step("own", len, (), transaction=database.engine)
        with pytest.raises(TransactionError, match="transaction=True"):
            shop.charge(order)

        @idem.idempotent
        def without() -> None:
            idem.current.step("count", len, (), transaction=True)

        with pytest.raises(TransactionError, match="idempotency_transaction"):
            without()


def forget_records(idem: Idempotency) -> None:
    idem.executor.store.client.flushdb()


def db(database: TestDatabase) -> Any:
    from celery_idempotent.sql.database import Database

    return Database(database.engine)


class TestKeysThatRunAgain:
    """``until="finished"``: each message has a row, and one runs after the other."""

    def test_two_messages_run_one_after_the_other(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        shop = Shop(idem, database, until="finished")
        shop.charge(order)
        shop.charge(order)
        assert (shop.runs, database.effects(order)) == (2, 2)

    def test_without_redis_too(self, database: TestDatabase, order: str) -> None:
        """The second one's INSERT waits for the first one's commit, and then succeeds."""
        away = Idempotency("redis://127.0.0.1:1/0", key_prefix=uuid4().hex)
        engine = new_engine(database.url)
        shop = Shop(away, database, until="finished", on_store_error="run", transaction=engine)
        running: list[int] = []
        peak: list[int] = []

        def during() -> None:
            running.append(1)
            peak.append(len(running))
            # Long enough for the other one to begin, if nothing holds it back.
            started.wait(0.3)
            running.pop()

        started = threading.Event()
        shop.during = during
        threads = [threading.Thread(target=shop.charge, args=(order,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        engine.dispose()
        assert peak == [1, 1, 1]
        assert database.effects(order) == 3


class TestBlocks:
    def test_a_block_is_one_transaction(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        def charge(fail: bool = False) -> Any:
            with idem.execution(order, transaction=database.engine) as execution:
                if execution.decision is Decision.REPLAY:
                    return execution.replay
                execution.connection.execute(effects.insert().values(name=order, pid=0))
                if fail:
                    raise ZeroDivisionError
                return execution.complete(uuid4().hex)

        with pytest.raises(ZeroDivisionError):
            charge(fail=True)
        assert database.effects(order) == 0
        receipt = charge()
        forget_records(idem)
        assert charge() == receipt
        assert database.effects(order) == 1

    def test_a_block_that_does_not_complete_rolls_back(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        with idem.execution(order, transaction=database.engine) as execution:
            execution.connection.execute(effects.insert().values(name=order, pid=0))
        assert database.effects(order) == 0
        assert database.rows(execution.key) == []

    def test_without_redis(self, database: TestDatabase, order: str) -> None:
        away = Idempotency("redis://127.0.0.1:1/0", key_prefix=uuid4().hex, on_store_error="run")
        receipts = []
        for _ in range(2):
            with away.execution(order, transaction=database.engine) as execution:
                if execution.decision is Decision.RUN:
                    execution.connection.execute(effects.insert().values(name=order, pid=0))
                    receipts.append(execution.complete(uuid4().hex))
                else:
                    receipts.append(execution.replay)
        assert receipts[0] == receipts[1]
        assert database.effects(order) == 1

    def test_asynchronous_blocks_and_batches_are_refused(
        self, server: RedisServer, database: TestDatabase
    ) -> None:
        idem = Idempotency(server.url, transaction=database.engine)

        async def enter() -> None:
            async with idem.execution("key"):
                pass

        with pytest.raises(SettingsError, match="not `async with`"):
            asyncio.run(enter())
        with pytest.raises(SettingsError, match="batch"):
            idem.begin_many(["key"])
        idem.close()
