"""The order example: finished steps are not repeated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from celery_idempotent.testing import IsolatedRecords
from celery_idempotent.testing.server import RedisServer
from examples.order import tasks
from examples.order.tasks import app, ship

orders = count(1)


@pytest.fixture
def order() -> int:
    return next(orders)


@pytest.fixture
def done(idempotency_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The steps that have run; tasks run eagerly."""
    app.conf.update(idempotency_redis_url=idempotency_server.url, task_always_eager=True)
    steps: list[str] = []
    for name in ("charge", "book", "mail"):
        monkeypatch.setattr(tasks, name, recorded(steps, name, getattr(tasks, name)))
    yield steps
    app.conf.task_always_eager = False


def recorded(steps: list[str], name: str, step: Any) -> Any:
    """Returns `step`, wrapped to append its name to `steps`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        steps.append(name)
        return step(*args, **kwargs)

    return run


def fail(*_: Any) -> None:
    raise ConnectionError("the mail server is unavailable")


def test_each_step_runs_once_for_all_duplicates(
    idempotency: IsolatedRecords, done: list[str], order: int
) -> None:
    first, second = (ship.delay(order, amount=999).get() for _ in range(2))

    assert second == first
    assert done == ["charge", "book", "mail"]
    idempotency.assert_ran_once(ship, order, amount=999)


def test_after_an_error_the_next_execution_continues(
    monkeypatch: pytest.MonkeyPatch, done: list[str], order: int
) -> None:
    with monkeypatch.context() as unavailable:
        unavailable.setattr(tasks, "mail", fail)
        with pytest.raises(ConnectionError):
            ship.delay(order, amount=999).get()

    shipped = ship.delay(order, amount=999).get()

    assert shipped["payment"].startswith("payment-")
    assert done == ["charge", "book", "mail"]


def test_the_provider_gets_the_key_of_the_call(
    monkeypatch: pytest.MonkeyPatch, done: list[str], order: int
) -> None:
    keys = []
    monkeypatch.setattr(tasks, "charge", lambda *_, key: keys.append(key))

    ship.delay(order, amount=999).get()

    assert keys == [str(ship.idempotency_key_of(order, amount=999))]
