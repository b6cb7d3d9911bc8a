"""Blocks and steps with a transaction, in this process."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import Decision, Idempotency, IdempotentTask, TransactionError
from celery_idempotent.errors import SettingsError
from celery_idempotent.sql.database import Database, step_databases
from celery_idempotent.sql.outcomes import Claim
from celery_idempotent.sql.transaction import Transaction
from tests.apps import run_command
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import Shop, each_kind, forget_records
from tests.sql.databases import TestDatabase, effects, new_engine
from tests.waiting import SOON, eventually

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

    def test_a_soft_time_limit_ends_the_wait_for_a_row(
        self, idem: Idempotency, database: TestDatabase, order: str
    ) -> None:
        """Another transaction has the row; nothing interrupts SQLite while it waits."""
        runs: list[str] = []

        @idem.idempotent(key="{order}", name="ship")
        def ship(order: str) -> None:
            idem.current.step("book", runs.append, order, transaction=database.engine)

        key = ship.idempotency_key_of(order)
        claim = Claim.of(key, idem.settings.key_prefix, "book", task_id="another")
        other = Transaction(db(database))
        if database.kind != "sqlite":
            contextvars.Context().run(other.begin, [claim])
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


class TestTheEndOfAKey:
    """The rows of its steps end with it: the next execution of the key runs them again."""

    @pytest.fixture
    def ship(self, app: Celery, database: TestDatabase) -> Any:
        """A task that has no transaction itself; its step writes an effect."""

        @app.task(
            bind=True,
            base=IdempotentTask,
            shared=False,
            name="ship",
            idempotency_key="{order}",
            idempotency_replay_errors=(ZeroDivisionError,),
            idempotency_error_ttl=1,
        )
        def ship(task: Any, order: str, fail: bool = False) -> Any:
            def book() -> int:
                connection = task.idempotency.connection
                connection.execute(effects.insert().values(name=order, pid=0))
                return database.effects(order)

            booked = task.idempotency.step("book", book, transaction=database.engine)
            return 1 / 0 if fail else booked

        return ship

    def test_it_is_forgotten(self, ship: Any, database: TestDatabase, order: str) -> None:
        for booked in range(3):
            assert ship.apply((order,)).get() == booked
            assert ship.idempotency_forget(order)

    def test_it_is_forgotten_by_a_process_that_knows_the_database_by_another_task(
        self, app: Celery, ship: Any, database: TestDatabase, order: str
    ) -> None:
        ship.apply((order,))
        step_databases.clear()

        @app.task(base=IdempotentTask, shared=False, idempotency_transaction=database.engine)
        def other() -> None:
            """Is never called."""

        assert ship.idempotency_forget(order)
        assert ship.apply((order,)).get() == 1

    def test_it_is_forgotten_if_another_engine_names_the_same_database(
        self, app: Celery, ship: Any, database: TestDatabase, order: str
    ) -> None:
        ship.apply((order,))

        @app.task(
            base=IdempotentTask, shared=False, idempotency_transaction=with_short_waits(database)
        )
        def other() -> None:
            """Is never called."""

        assert ship.idempotency_forget(order)
        assert ship.apply((order,)).get() == 1

    def test_it_is_forgotten_by_an_operator(
        self,
        app: Celery,
        ship: Any,
        database: TestDatabase,
        order: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tests.sql.shop.database", database.engine)
        ship.apply((order,))
        step_databases.clear()
        key = str(ship.idempotency_key_of(order))
        for command in (
            ["purge", "--database", "tests.sql.shop:database"],
            ["forget", key, "--yes", "--database", "tests.sql.shop:database"],
        ):
            run_command(app, *command)

        assert ship.apply((order,)).get() == 1

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "late"])
    def test_the_retention_of_its_error_ends(
        self,
        ship: Any,
        database: TestDatabase,
        order: str,
        is_late: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def limit_late(*args: Any) -> None:
            eventually(lambda: ship.idempotency_record(order, True) is None, "it has expired")
            limit_steps(*args)

        limit_steps, call = Database.limit_steps, partial(ship.apply, (order, True))
        if is_late:
            monkeypatch.setattr(Database, "limit_steps", limit_late)
        for expected in (1, 2):
            assert isinstance(call().result, ZeroDivisionError)
            assert database.effects(order) == expected
            eventually(lambda: ship.idempotency_record(order, True) is None, "it has expired")


def with_short_waits(database: TestDatabase) -> sa.Engine:
    """Returns an engine of `database` that waits for a lock for a second only."""
    options: dict[str, dict[str, Any]] = {
        "sqlite": {"timeout": 1},
        "postgresql": {"options": "-c lock_timeout=1000"},
        "mariadb": {"init_command": "SET innodb_lock_wait_timeout = 1"},
    }
    return new_engine(database.url, poolclass=sa.NullPool, connect_args=options[database.kind])


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
