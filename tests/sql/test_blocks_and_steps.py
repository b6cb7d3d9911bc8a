"""Blocks and steps with a transaction, in this process."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_idempotent import Decision, Idempotency, TransactionError
from celery_idempotent.errors import SettingsError
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import Shop, each_kind, forget_records
from tests.sql.databases import TestDatabase, effects

pytestmark = each_kind


class TestSteps:
    def test_a_step_in_the_transaction_is_rolled_back_with_it(self, shop: Shop, order: str) -> None:
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

    def test_a_step_has_no_transaction_of_its_own(
        self, shop: Shop, database: TestDatabase, idem: Idempotency, order: str
    ) -> None:
        shop.during = lambda: idem.current.step("own", len, (), transaction=database.engine)
        with pytest.raises(TypeError, match="idempotency_transaction"):
            shop.charge(order)

        @idem.idempotent(name="without")
        def without() -> None:
            idem.current.step("count", len, (), transaction=True)

        with pytest.raises(TransactionError, match="idempotency_transaction"):
            without()


class TestBlocks:
    def test_one_transaction(self, idem: Idempotency, database: TestDatabase, order: str) -> None:
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
        with idem.execution(order, transaction=database.engine) as incomplete:
            incomplete.connection.execute(effects.insert().values(name=order, pid=0))
        assert (database.effects(order), database.rows(incomplete.key)) == (0, [])
        receipt = charge()
        forget_records(idem)
        assert charge() == receipt
        assert database.effects(order) == 1

    def test_without_redis(self, database: TestDatabase, order: str) -> None:
        away = Idempotency("redis://127.0.0.1:1/0", key_prefix=uuid4().hex, on_store_error="run")
        receipts = []

        def book(connection: sa.Connection) -> None:
            connection.execute(effects.insert().values(name=order, pid=0))

        for _ in range(2):
            with away.execution(order, transaction=database.engine) as execution:
                if execution.decision is Decision.RUN:
                    execution.step("book", book, execution.connection, transaction=True)
                    receipts.append(execution.complete(uuid4().hex))
                else:
                    receipts.append(execution.replay)
        assert receipts[0] == receipts[1]
        assert database.effects(order) == 1

    def test_async_blocks_are_refused(self, server: RedisServer, database: TestDatabase) -> None:
        idem = Idempotency(server.url, transaction=database.engine)

        async def enter() -> None:
            async with idem.execution("key"):
                pass

        with pytest.raises(SettingsError, match="not `async with`"):
            asyncio.run(enter())
        idem.close()
