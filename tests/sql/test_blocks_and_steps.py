"""Blocks and steps with a transaction, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from celery_idempotent import Decision, Idempotency, TransactionError
from celery_idempotent.errors import SettingsError
from celery_idempotent.testing.server import RedisServer
from tests.sql.conftest import each_kind
from tests.sql.databases import TestDatabase, effects
from tests.sql.function_shop import Shop, forget_records

pytestmark = each_kind


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


def db(database: TestDatabase) -> Any:
    from celery_idempotent.sql.database import Database

    return Database(database.engine)


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

    def test_asynchronous_blocks_are_refused(
        self, server: RedisServer, database: TestDatabase
    ) -> None:
        idem = Idempotency(server.url, transaction=database.engine)

        async def enter() -> None:
            async with idem.execution("key"):
                pass

        with pytest.raises(SettingsError, match="not `async with`"):
            asyncio.run(enter())
        idem.close()
