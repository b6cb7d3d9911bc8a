"""Calls inside a body with a transaction: plain ones join it, and those with a key are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_idempotent import Idempotency, IdempotentTask, TransactionError
from tests.flow.deliveries import Deliveries
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import each_kind_in_full
from tests.sql.databases import CreateDatabase, TestDatabase, effects

pytestmark = each_kind_in_full


def write(connection: Any, name: str | None) -> None:
    connection.execute(effects.insert().values(name=name, pid=0))


class Shop:
    """A task whose body calls that of another one, as a function."""

    def __init__(self, app: Celery, outer: Any, inner: Any) -> None:
        self.app = app
        #: What `charge` does after it has called `book`.
        self.afterwards: Callable[[Any], Any] = lambda task: None

        options = {"bind": True, "base": IdempotentTask, "shared": False}
        task = partial(self.app.task, idempotency_key="{order}", **options)

        @task(name="book", idempotency_transaction=inner)
        def book(task: Any, order: str, fail: bool = False) -> None:
            connection = task.idempotency.connection
            write(connection, f"book {order[:8]}")
            connection.execute(effects.update().where(effects.c.name == order).values(pid=1))
            if fail:
                write(connection, None)

        @task(name="charge", idempotency_transaction=outer)
        def charge(task: Any, order: str) -> str:
            write(task.idempotency.connection, order)
            book(order)
            self.afterwards(task)
            return "charged"

        self.book, self.charge = book, charge

    def run(self, order: str) -> Any:
        """Publishes a charge and delivers its messages; returns its result."""
        deliveries = Deliveries(self.app, self.charge)
        first = deliveries.delivered(order)
        deliveries.deliver_all()
        return self.app.backend.get_result(first.id)


NewShop = Callable[..., Shop]


@pytest.fixture
def new_shop(app: Celery) -> NewShop:
    return lambda outer, inner=None: Shop(app, outer, inner or outer)


def retry_once(task: Any) -> None:
    if task.request.retries == 0:
        raise task.retry(countdown=0)


class TestPlainCalls:
    @pytest.mark.parametrize("is_view", [False, True], ids=["engine", "view of it"])
    def test_a_task_joins_the_transaction_of_the_body(
        self, new_shop: NewShop, database: TestDatabase, order: str, is_view: bool
    ) -> None:
        engine = database.engine
        shop = new_shop(engine, engine.execution_options() if is_view else engine)
        shop.afterwards = retry_once

        assert shop.run(order) == "charged"
        assert database.effects(order) == 1
        assert database.effects(f"book {order[:8]}") == 1

    def test_a_view_with_other_options_is_refused(
        self, new_shop: NewShop, database: TestDatabase, order: str
    ) -> None:
        """A connection has the options of one of them, such as its schema."""
        view = database.engine.execution_options(schema_translate_map={None: "tenant"})
        error = new_shop(database.engine, view).run(order)

        assert "other execution options" in str(error)
        assert database.effects(order) == 0

    def test_what_is_caught_is_rolled_back_alone(
        self, new_shop: NewShop, database: TestDatabase, order: str
    ) -> None:
        """As in a nested ``atomic()`` of Django."""
        shop = new_shop(database.engine)

        def book_again(task: Any) -> None:
            with pytest.raises(sa.exc.IntegrityError):
                shop.book(order, fail=True)

        shop.afterwards = book_again
        assert shop.run(order) == "charged"
        assert database.effects(f"book {order[:8]}") == 1

    def test_another_database_keeps_its_own(
        self, new_shop: NewShop, database: TestDatabase, create_database: CreateDatabase, order: str
    ) -> None:
        other = create_database(database.kind)
        shop = new_shop(database.engine, other.engine)
        shop.charge.idempotency_enabled = False
        shop.charge.idempotency_configuration  # noqa: B018 - it is read
        for charge in (shop.charge, shop.run):
            charge(order)
        assert (database.effects(order), other.effects(order)) == (2, 0)
        assert other.effects(f"book {order[:8]}") == 2

    def test_in_a_block(
        self, new_shop: NewShop, server: RedisServer, database: TestDatabase, order: str
    ) -> None:
        book = new_shop(database.engine).book
        idem = Idempotency(server.url, key_prefix=uuid4().hex, transaction=database.engine)
        with idem.execution(order) as execution:
            write(execution.connection, order)
            book(order)
        assert database.effects(order) == 0
        assert database.effects(f"book {order[:8]}") == 0
        book(order)
        assert database.effects(f"book {order[:8]}") == 1, "outside it is a transaction again"
        idem.close()


@pytest.mark.parametrize("kind", ["function", "block", "eager task"])
def test_calls_with_a_key_are_refused(
    new_shop: NewShop, server: RedisServer, database: TestDatabase, order: str, kind: str
) -> None:
    """They commit by themselves, and would wait for the locks of the body for ever."""
    shop = new_shop(database.engine)
    idem = Idempotency(server.url, key_prefix=uuid4().hex, transaction=database.engine)

    def block(manager: AbstractContextManager[Any]) -> None:
        with manager:
            pass

    ship = idem.idempotent(key="{order}", name="ship")(lambda order: None)
    nested = {
        "function": lambda: ship(order),
        "block": lambda: block(idem.execution(order)),
        "eager task": lambda: shop.book.apply((order,), throw=True),
    }
    raised: list[str] = []

    def call(task: Any) -> None:
        with pytest.raises(TransactionError) as caught:
            nested[kind]()
        raised.append(str(caught.value))

    shop.afterwards = call
    assert shop.run(order) == "charged"
    assert len(raised) == 1
    assert "cannot begin inside another transaction" in raised[0]
    nested[kind]()  # the key is free
    idem.close()
