"""Messages whose transaction is rolled back, and tasks that replace themselves.

A part runs only if the parts before it were committed.
"""

from __future__ import annotations

import sqlite3
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from celery import Celery
from celery.worker.request import Request

from celery_idempotent import IdempotentTask
from celery_idempotent.core.task.publish.message_copy import with_derived_key
from celery_idempotent.extensions import outbox
from celery_idempotent.extensions.transaction import MAX_ROLLBACKS
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.sqlalchemy import SQLAlchemySession
from tests.flow.deliveries import Deliveries, End, record_of
from tests.sql.conftest import each_kind_in_full, poison
from tests.sql.databases import TestDatabase, effects

pytestmark = each_kind_in_full


#: Options of each task.
TASK = {"bind": True, "base": IdempotentTask, "shared": False, "idempotency_key": "{order}"}


class Shop:
    """A task that writes an effect in each of three parts, and the messages of its calls."""

    def __init__(self, app: Celery, database: TestDatabase, order: str) -> None:
        self.app, self.database, self.order = app, database, order
        app.conf.idempotency_transaction = database.engine

        @self.app.task(name="charge_in_parts", **TASK)
        def charge(task: Any, order: str, left: int) -> str:
            task.idempotency.connection.execute(effects.insert().values(name=order, pid=left))
            if left:
                task.replace(charge.s(order, left - 1))
            return "charged"

        self.charge: IdempotentTask = charge
        self.deliveries = Deliveries(self.app, charge)

    def publish(self, left: int = 2, **options: Any) -> Request:
        return self.deliveries.publish(self.order, left, **options)

    def deliver(self, message: Request | None) -> End:
        return self.deliveries.deliver(message)

    def call(self) -> Request:
        """Publishes a message, delivers it and returns it."""
        message = self.publish()
        self.deliver(message)
        return message

    def deliver_with(self, message: Request | None, place: Any, name: str, replacement: Any) -> End:
        """Delivers it while an attribute has another value."""
        with patch.object(place, name, replacement):
            return self.deliver(message)

    def deliver_and_roll_back(self, message: Request | None) -> End:
        """Delivers it; its commit fails."""
        return self.deliver_with(message, SQLAlchemySession, "commit", deadlock)

    def die(self, message: Request, place: Any, name: str) -> None:
        """Delivers it; the process dies in a function."""
        with pytest.raises(SystemExit):
            self.deliver_with(message, place, name, die)

    def effects(self) -> list[int]:
        """Returns the parts that were committed, in order."""
        with self.database.engine.connect() as connection:
            query = sa.select(effects.c.pid).where(effects.c.name == self.order)
            return list(connection.execute(query.order_by(effects.c.id)).scalars())

    def result(self, message: Request) -> Any:
        return self.app.backend.get_result(message.id)

    def assert_charged(self, message: Request, *parts: int) -> None:
        """Delivers what is in the broker; the message has its result, and these are committed."""
        self.deliveries.deliver_all()
        assert self.result(message) == "charged"
        assert self.effects() == [*parts]


def deadlock(session: SQLAlchemySession) -> None:
    session.discard()
    raise sqlite3.OperationalError("database is locked")


@pytest.fixture
def shop(app: Celery, database: TestDatabase, order: str) -> Shop:
    return Shop(app, database, order)


@pytest.mark.parametrize("more", [0, 1])
def test_too_many_rollbacks_are_the_error_of_the_task(shop: Shop, more: int) -> None:
    """Requeues because of conflicts do not count."""
    key = shop.charge.idempotency_key_of(shop.order, 0)
    requeued = {"put_back_count": MAX_ROLLBACKS}
    headers = with_derived_key(None, key, shop.order, **requeued)
    message = shop.publish(0, task_id=shop.order, headers=headers)
    for _ in range(MAX_ROLLBACKS):
        assert shop.deliver_and_roll_back(message).state == "ignored"
        message = shop.deliveries.received()
    if more:
        end = shop.deliver_and_roll_back(message)
        assert (end.state, type(end.error)) == ("failure", sqlite3.OperationalError)
    else:
        assert shop.deliver(message).state == "success"
    assert shop.deliveries.next() is None
    assert shop.effects() == [0][more:]


def test_each_part_runs_once(shop: Shop) -> None:
    shop.assert_charged(shop.call(), 2, 1, 0)


@pytest.mark.parametrize("committed", [0, 1])
def test_no_part_is_published_if_the_one_before_was_rolled_back(shop: Shop, committed: int) -> None:
    first = message = shop.publish()
    for _ in range(committed):
        shop.deliver(message)
        message = shop.deliveries.next()  # type: ignore[assignment]
    assert shop.deliver_and_roll_back(message).state == "ignored"
    again = shop.deliveries.next()

    assert again.args == message.args
    assert shop.deliveries.next() is None
    assert len(shop.effects()) == committed

    shop.deliver(again)
    shop.assert_charged(first, 2, 1, 0)


@pytest.mark.parametrize("poisoned", [False, True])
def test_the_process_dies_after_the_commit(shop: Shop, poisoned: bool) -> None:
    """The next delivery publishes the part that the row has."""
    message = shop.publish()
    shop.die(message, outbox, "publish")
    assert shop.deliveries.next() is None
    if poisoned:
        key = shop.charge.idempotency_key_of(shop.order, 2)
        poison(shop.charge.idempotency_configuration.executor, key)
    shop.deliver(message)
    shop.assert_charged(message, 2, 1, 0)


def test_a_part_is_the_only_one_although_it_was_published_twice(shop: Shop) -> None:
    """The process dies after it has published the part, and before it has noted that."""
    message = shop.publish()
    shop.die(message, Database, "clear_outbox")
    part = shop.deliveries.next()
    shop.deliver(message)
    shop.deliver(part)
    shop.assert_charged(message, 2, 1, 0)


def die(*_: Any) -> None:
    raise SystemExit


@pytest.mark.parametrize("dies", [False, True])
def test_a_part_that_can_never_be_published_fails_the_task(shop: Shop, dies: bool) -> None:
    """The error ends the task as that of a part does: the next call runs."""
    surplus = shop.app.signature("charge_in_parts", (shop.order, 1, "surplus"))
    message = shop.publish()
    with patch.object(shop.charge, "s", lambda *_: surplus):
        if dies:
            shop.die(message, outbox, "publish")
        end = shop.deliver(message)

    assert end.state == "failure"
    assert isinstance(end.error, TypeError)
    assert isinstance(shop.result(message), TypeError)
    shop.assert_charged(shop.call(), 2, 2, 1, 0)


@pytest.mark.parametrize("order_of_delivery", ["duplicate first", "part first"])
def test_a_duplicate_of_a_part_that_was_not_recorded(shop: Shop, order_of_delivery: str) -> None:
    """The process is killed after the commit, and the lease expires."""
    message = shop.call()
    part = shop.deliveries.next()
    record_of(shop.charge, shop.order, 2).forget()
    duplicate = shop.publish()
    both = [duplicate, part] if order_of_delivery == "duplicate first" else [part, duplicate]
    for delivered in both:
        shop.deliver(delivered)
    shop.deliveries.deliver_all()

    assert shop.result(message) == shop.result(duplicate) == "charged"
    assert shop.effects() == [2, 1, 0]


def test_a_part_that_fails_frees_the_key(shop: Shop) -> None:
    shop.call()
    part = shop.deliveries.next()
    assert shop.deliver_with(part, shop.charge, "run", out_of_stock).state == "failure"
    shop.assert_charged(shop.call(), 2, 2, 1, 0)


def test_another_task_that_replaces_it_and_fails_frees_the_key(shop: Shop) -> None:
    @shop.app.task(shared=False, name="fail_once")
    def fail_once() -> str:
        if not fails.pop():
            return "charged"
        raise LookupError

    @shop.app.task(name="hand_on", **TASK)
    def hand_on(task: Any, order: str) -> None:
        task.idempotency.connection.execute(effects.insert().values(name=order, pid=1))
        task.replace(fail_once.si())

    fails = [False, True]
    deliveries = Deliveries(shop.app, hand_on)
    messages = []
    for _ in range(2):
        messages.append(deliveries.publish(shop.order))
        deliveries.deliver(messages[-1])
        replacements = Deliveries(shop.app, fail_once)
        part = replacements.next()
        replacements.deliver(part)
    replaced, following = messages

    assert shop.result(following) == "charged"
    assert shop.effects() == [1, 1]
    assert deliveries.deliver(replaced).state == "success"  # a copy replays the next outcome
    assert shop.effects() == [1, 1]


def out_of_stock(*_: Any) -> None:
    raise LookupError("out of stock")
