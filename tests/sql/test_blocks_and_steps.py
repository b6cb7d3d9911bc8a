"""Blocks and steps with a transaction, in this process."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import Decision, Idempotency, TransactionError
from celery_idempotent.errors import SettingsError
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim
from celery_idempotent.sql.transaction import Transaction
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import Shop, each_kind, forget_records
from tests.sql.databases import TestDatabase, effects
from tests.waiting import SOON

pytestmark = each_kind


class TestSteps:
    def test_a_step_of_the_body_s_transaction_is_rolled_back_with_it(
        self, shop: Shop, order: str
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


@contextmanager
def soft_limit_at_claim(database: TestDatabase) -> Iterator[None]:
    """Sends the signal of a soft time limit when a row is claimed."""

    def send(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT"):
            signal.raise_signal(signal.SIGUSR1)

    def handle(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, handle)
    sa.event.listen(database.engine, "before_cursor_execute", send)
    try:
        yield
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", send)
        signal.signal(signal.SIGUSR1, before)


def test_a_soft_time_limit_ends_the_wait_for_a_row(
    idem: Idempotency, database: TestDatabase, order: str
) -> None:
    """Another transaction has the row; nothing interrupts SQLite while it waits."""
    runs: list[str] = []
    ship = idem.idempotent(key="{order}", name="ship", transaction=database.engine)(
        lambda order: runs.append(order)
    )

    key = ship.idempotency_key_of(order)
    claim = Claim.of(key, idem.settings.key_prefix, task_id="another")
    other = Transaction(Database(database.engine))
    if database.kind != "sqlite":
        contextvars.Context().run(other.begin, claim)
    timer = threading.Timer(SOON / 2, other.rollback)
    timer.start()
    with soft_limit_at_claim(database), pytest.raises(SoftTimeLimitExceeded):
        ship(order)
    timer.cancel()
    assert runs == []
    assert database.kind == "sqlite" or other.phase == "open", "it has not waited for the end"
    other.rollback()
    ship(order)
    assert runs == [order]


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
