"""The order in three steps: what is finished is not repeated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from celery_idempotent.pytest_plugin import Idempotency
from celery_idempotent.testing.server import RedisServer
from examples.order import tasks
from examples.order.tasks import app, ship

orders = count(1)


@pytest.fixture
def order() -> int:
    return next(orders)


@pytest.fixture
def done(idempotency_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was done, step by step; the app is eager."""
    app.conf.update(idempotency_redis_url=idempotency_server.url, task_always_eager=True)
    steps: list[str] = []
    for name in ("charge", "book", "mail"):
        monkeypatch.setattr(tasks, name, telling(steps, name, getattr(tasks, name)))
    yield steps
    app.conf.task_always_eager = False


def telling(steps: list[str], name: str, step: Any) -> Any:
    """`step`, which also says that it was done."""

    def told(*args: Any, **kwargs: Any) -> Any:
        steps.append(name)
        return step(*args, **kwargs)

    return told


def fails(*_: Any) -> None:
    raise ConnectionError("the mail server is away")


def test_each_step_happens_once_for_all_duplicates(
    idempotency: Idempotency, done: list[str], order: int
) -> None:
    first, second = (ship.delay(order, amount=999).get() for _ in range(2))

    assert second == first
    assert done == ["charge", "book", "mail"]
    idempotency.assert_ran_once(ship, order, amount=999)


def test_after_an_error_it_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch, done: list[str], order: int
) -> None:
    with monkeypatch.context() as away:
        away.setattr(tasks, "mail", fails)
        with pytest.raises(ConnectionError):
            ship.delay(order, amount=999).get()

    shipped = ship.delay(order, amount=999).get()

    assert shipped["payment"].startswith("payment-")
    assert done == ["charge", "book", "mail"]


def test_the_provider_gets_the_key_that_all_duplicates_have(
    monkeypatch: pytest.MonkeyPatch, done: list[str], order: int
) -> None:
    keys = []
    monkeypatch.setattr(tasks, "charge", lambda *_, key: keys.append(key))

    ship.delay(order, amount=999).get()

    assert keys == [str(ship.idempotency_key_of(order, amount=999))]
