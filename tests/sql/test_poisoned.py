"""Keys whose executions have died too often: one of them may have committed its outcome."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_idempotent import IdempotentTask, PoisonedTaskError, StoreUnavailableError
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import NewShop, Shop, each_kind, poison
from tests.sql.databases import TestDatabase
from tests.waiting import SOON


def poison_call(shop: Shop, order: str) -> None:
    poison(shop.idem.executor, shop.charge.idempotency_key_of(order))


@each_kind
class TestPoisoned:
    def test_its_outcome_is_returned(self, shop: Shop, database: TestDatabase, order: str) -> None:
        receipt = shop.charge(order)
        poison_call(shop, order)

        assert shop.charge(order) == receipt
        with database.engine.begin() as connection:
            connection.execute(sa.text("DELETE FROM celery_idempotency_outcomes"))
        assert shop.charge(order) == receipt, "the record has it, too"
        assert shop.runs == 1

    def test_without_a_committed_outcome_it_is_refused(self, shop: Shop, order: str) -> None:
        poison_call(shop, order)
        with pytest.raises(PoisonedTaskError):
            shop.charge(order)
        assert shop.runs == 0

    def test_waits_for_a_transaction(self, shop: Shop, database: TestDatabase, order: str) -> None:
        """An execution is frozen in its body, and was taken over too often."""
        begun, frozen = threading.Event(), threading.Event()

        def freeze() -> str:
            begun.set()
            assert frozen.wait(SOON)
            return "committed late"

        shop.during = freeze
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(shop.charge, order)
            assert begun.wait(SOON)
            poison_call(shop, order)
            second = pool.submit(shop.charge, order)
            assert wait([second], 0.2).not_done
            frozen.set()

        assert first.result() == second.result() == "committed late"
        assert shop.runs == 1

    def test_without_a_database_it_is_not_refused_yet(self, new_shop: NewShop, order: str) -> None:
        shop = new_shop(transaction=sa.create_engine("sqlite:////nonexistent/shop.db"))
        poison_call(shop, order)
        with pytest.raises(StoreUnavailableError, match="raised OperationalError"):
            shop.charge(order)


def test_a_poisoned_key_is_published_under_dedupe_publish(server: RedisServer) -> None:
    """Only a worker can determine whether one of the executions has committed."""
    app = Celery(broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_redis_url=server.url, idempotency_dedupe_publish=True)

    def task(name: str, **options: Any) -> Any:
        @app.task(base=IdempotentTask, name=name, shared=False, **options)
        def charge(order: str) -> None: ...

        return charge

    for charge, expected in (
        (task("plain"), (True, 1)),
        (task("sql", idempotency_transaction=sa.create_engine("sqlite://")), (False, 2)),
    ):
        key = charge.idempotency_key_of("order")
        poison(charge.idempotency_configuration.executor, key)
        published = {charge.delay("order").id for _ in range(2)}
        assert ("dead" in published, len(published)) == expected
    app.close()
