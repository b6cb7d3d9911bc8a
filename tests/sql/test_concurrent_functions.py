"""Executions of one key at the same time, in threads: the row of the database decides."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from celery_idempotent import Idempotency
from tests.sql.conftest import Shop, each_kind, forget_records, hold_row
from tests.sql.databases import TestDatabase, new_engine
from tests.waiting import SOON, eventually

pytestmark = each_kind


class TestTwoExecutions:
    def test_the_second_waits_for_the_outcome_of_the_first(self, shop: Shop, order: str) -> None:
        """Redis has lost the record while the first one runs."""
        second: list[Future[Any]] = []

        def during() -> Any:
            if shop.runs == 1:
                forget_records(shop.idem)
                shop.during = lambda: None
                second.append(pool.submit(shop.charge, order))
                # It has begun, and waits in the database.
                store = shop.idem.executor.store
                eventually(lambda: store.client.dbsize(), "the second one has begun")
            return "the first"

        shop.during = during
        with ThreadPoolExecutor(1) as pool:
            assert shop.charge(order) == "the first"
        assert second[0].result() == "the first"
        assert (shop.runs, shop.effects(order)) == (1, 1)

    def test_all_waiters_go_on_after_a_rollback(self, database: TestDatabase, order: str) -> None:
        """Without Redis, the row alone protects; on MariaDB, all waiters but one deadlock."""
        engine = new_engine(database.url, pool_size=10)
        prefix, url = uuid4().hex, "redis://127.0.0.1:1/0"
        how: dict[str, Any] = {"transaction": engine, "on_store_error": "run"}
        shops = [Shop(Idempotency(url, key_prefix=prefix), database, **how) for _ in range(6)]
        started = threading.Barrier(7)

        def charge(each: Shop) -> Any:
            started.wait(SOON)
            return each.charge(order)

        with ThreadPoolExecutor(6) as pool, engine.begin() as connection:
            results = pool.map(charge, shops)
            # Holds the row, then rolls back.
            hold_row(connection, prefix, shops[0].charge.idempotency_key_of(order))
            started.wait(SOON)
            connection.rollback()
        first, *others = results
        engine.dispose()
        assert others == [first] * 5
        assert database.effects(order) == 1
        assert sum(each.runs for each in shops) == 1


class TestKeysThatRunAgain:
    """``until="finished"``: each message has a row, and one runs after the other."""

    def test_messages_run_in_turn_without_redis(self, database: TestDatabase, order: str) -> None:
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
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(shop.charge, [order] * 3))
        engine.dispose()
        assert peak == [1, 1, 1]
        assert database.effects(order) == 3
