"""Messages whose transaction the database rolls back: requeued, but not for ever."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.core.task.message import republished
from celery_idempotent.extensions.transaction import MAX_ROLLBACKS
from tests.flow.deliveries import Deliveries, End
from tests.sql.conftest import each_kind_in_full
from tests.sql.databases import TestDatabase, effects

pytestmark = each_kind_in_full


class Shop:
    """A task that writes an effect, and whose transaction is rolled back `rollbacks` times."""

    def __init__(self, app: Celery, database: TestDatabase) -> None:
        app.conf.idempotency_transaction = database.engine
        self.rollbacks = 0

        @app.task(
            bind=True, base=IdempotentTask, shared=False, name="charge", idempotency_key="{order}"
        )
        def charge(task: Any, order: str) -> None:
            task.idempotency.connection.execute(effects.insert().values(name=order, pid=0))
            if self.rollbacks:
                self.rollbacks -= 1
                raise sqlite3.OperationalError("database is locked")

        self.charge: IdempotentTask = charge
        self.deliveries = Deliveries(app, charge)

    def deliver_all(self, order: str, requeues: int) -> End:
        """Publishes a message that was requeued so often because of conflicts; returns its end."""
        headers = republished.with_derived_key(
            None,
            self.charge.idempotency_key_of(order),
            order,
            requeue_count=requeues,
        )
        message: Any = self.deliveries.publish(order, task_id=order, headers=headers)
        while message is not None:
            end = self.deliveries.deliver(message)
            message = self.deliveries.next()
        return end


@pytest.fixture
def shop(app: Celery, database: TestDatabase) -> Shop:
    return Shop(app, database)


def test_conflicts_do_not_count(shop: Shop, database: TestDatabase, order: str) -> None:
    shop.rollbacks = MAX_ROLLBACKS

    assert shop.deliver_all(order, requeues=MAX_ROLLBACKS).state == "success"
    assert database.effects(order) == 1


def test_too_many_rollbacks_are_the_error_of_the_task(
    shop: Shop, database: TestDatabase, order: str
) -> None:
    shop.rollbacks = MAX_ROLLBACKS + 1

    end = shop.deliver_all(order, requeues=0)
    assert (end.state, type(end.error)) == ("failure", sqlite3.OperationalError)
    assert database.effects(order) == 0
