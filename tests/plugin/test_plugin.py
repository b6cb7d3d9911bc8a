"""Tests of the fixtures of the pytest plugin."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, State
from celery_idempotent.pytest_plugin import Idempotency
from celery_idempotent.testing.server import RedisServer


@pytest.fixture
def charge(idempotency_server: RedisServer) -> Any:
    app = Celery("plugin", backend=idempotency_server.url, set_as_current=False)
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True

    @app.task(base=IdempotentTask, bind=True, shared=False, name="plugin.charge")
    def charge(self: IdempotentTask, order: str, fail: bool = False) -> int:
        if fail:
            raise ValueError(order)
        return self.idempotency.attempt

    return charge


@pytest.fixture(autouse=True)
def _clean(idempotency_server: RedisServer) -> None:
    idempotency_server.client().flushall()


def test_a_crash_leaves_no_outcome_and_the_next_call_takes_over(
    idempotency: Idempotency, charge: Any
) -> None:
    idempotency.crash(charge, "one")
    assert charge.idempotency_record("one").state is State.STARTED
    assert charge.delay("one").get() == 2


def test_an_expired_lease_is_taken_over_from_a_running_execution(
    idempotency: Idempotency, charge: Any
) -> None:
    app = charge.app

    @app.task(base=IdempotentTask, bind=True, shared=False, name="plugin.slow")
    def slow(self: IdempotentTask, nested: bool) -> tuple[int, bool]:
        if self.idempotency.attempt == 1:
            idempotency.expire_lease(slow, nested)
            inner = slow.delay(nested).get()
            return ("stale", *inner)
        return ("winner", self.idempotency.recovered)

    assert slow.delay(True).get() == ["winner", True]


def test_a_call_that_ran_once_passes(idempotency: Idempotency, charge: Any) -> None:
    charge.delay("two")
    charge.delay("two")
    idempotency.assert_ran_once(charge, "two")


def test_a_call_that_never_ran_does_not_pass(idempotency: Idempotency, charge: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="absent after 0 executions"):
        idempotency.assert_ran_once(charge, "three")


def test_a_call_that_ran_twice_does_not_pass(idempotency: Idempotency, charge: Any) -> None:
    charge.delay("four")
    charge.idempotency_forget("four")
    charge.delay("four")
    with pytest.raises(pytest.fail.Exception, match="COMPLETED after 2 executions"):
        idempotency.assert_ran_once(charge, "four")


def test_a_key_without_a_lease_cannot_expire(idempotency: Idempotency, charge: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match="is absent"):
        idempotency.expire_lease(charge, "five")


def test_a_finished_call_cannot_crash(idempotency: Idempotency, charge: Any) -> None:
    charge.delay("six")
    with pytest.raises(pytest.fail.Exception, match="begin replied 'finished'"):
        idempotency.crash(charge, "six")
