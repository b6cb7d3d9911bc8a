"""Executions of one key at the same time, in threads: the row of the database decides."""

from __future__ import annotations

import threading
from typing import Any
from uuid import uuid4

from celery_idempotent import Idempotency
from tests.sql.conftest import NewShop, Shop, each_kind, forget_records, hold_row
from tests.sql.databases import TestDatabase, new_engine
from tests.waiting import SOON, eventually

pytestmark = each_kind


class TestTwoExecutions:
    def test_the_second_waits_and_gets_the_outcome_of_the_first(
        self, shop: Shop, order: str
    ) -> None:
        """Redis has lost the record while the first one runs."""
        second: list[Any] = []
        thread = threading.Thread(target=lambda: second.append(shop.charge(order)))

        def during() -> Any:
            if shop.runs == 1:
                forget_records(shop.idem)
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
        assert (shop.runs, shop.effects(order)) == (1, 1)

    def test_all_waiters_go_on_after_a_rollback(
        self, new_shop: NewShop, database: TestDatabase, order: str
    ) -> None:
        """Without Redis, the row alone protects; on MariaDB, all waiters but one deadlock."""
        engine = new_engine(database.url, pool_size=10)
        shop = new_shop(transaction=engine, on_store_error="run")
        prefix, url = uuid4().hex, "redis://127.0.0.1:1/0"
        shops = [
            Shop(
                Idempotency(url, key_prefix=prefix), database, transaction=engine,
                on_store_error="run",
            )
            for _ in range(6)
        ]  # fmt: skip
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
            hold_row(connection, prefix, key)
            started.wait(SOON)
            connection.rollback()
        for thread in threads:
            thread.join(SOON)
        engine.dispose()
        assert len(results) == 6
        assert all(result == results[0] for result in results)
        assert database.effects(order) == 1
        assert sum(each.runs for each in shops) == 1


class TestKeysThatRunAgain:
    """``until="finished"``: each message has a row, and one runs after the other."""

    def test_two_messages_run_one_after_the_other(self, new_shop: NewShop, order: str) -> None:
        shop = new_shop(until="finished")
        shop.charge(order)
        shop.charge(order)
        assert (shop.runs, shop.database.effects(order)) == (2, 2)

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
