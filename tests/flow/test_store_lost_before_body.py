"""The store is lost between the reply to a begin and the body, or the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery.utils.dispatch import Signal

from celery_idempotent import ConflictError, IdempotentTask, StoreUnavailableError, signals
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

Make = Callable[..., IdempotentTask]


@contextmanager
def once_at(signal: Signal, action: Callable[[], Any]) -> Iterator[None]:
    """Runs `action` when `signal` is sent for the first time."""

    def receive(**_: Any) -> None:
        signal.disconnect(receive)
        action()

    signal.connect(receive)
    yield
    signal.disconnect(receive)


@pytest.mark.parametrize("back", [True, False], ids=["back in time", "away"])
def test_the_body_runs_once_and_its_result_is_returned(
    task: Make, own_server: RedisServer, sent_signals: list[str], back: bool
) -> None:
    runs: list[bool] = []

    def body(self: IdempotentTask, order: str) -> str:
        runs.append(own_server.running)
        if back:
            own_server.restart()
        return "receipt"

    pay = task(body, redis_url=own_server.url, lease=60 if back else 1)
    with once_at(signals.begun, own_server.kill):
        assert pay.delay("1").get() == "receipt"

    assert runs == [False]
    assert sent_signals == ["begun", "completed" if back else "outcome_unsaved"]
    assert not back or pay.idempotency_record("1").result == "receipt"


def test_a_begin_that_must_be_confirmed_runs_no_body(task: Make, own_server: RedisServer) -> None:
    runs: list[int] = []

    def body(self: IdempotentTask, order: str) -> None:
        runs.append(self.idempotency.attempt)

    pay = task(body, redis_url=own_server.url, redis_timeout=0.5, lease=1, max_attempts=1)
    with once_at(signals.begin_replied, own_server.kill), pytest.raises(StoreUnavailableError):
        pay.delay("1").get()
    assert runs == []

    own_server.restart()

    def run_again() -> list[int]:
        with suppress(ConflictError):  # until the lease has ended
            pay.delay("1")
        return runs

    assert eventually(run_again) == [1]


def test_a_replay_has_its_outcome(task: Make, own_server: RedisServer) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        return f"receipt {order}"

    pay = task(body, redis_url=own_server.url)
    assert pay.delay("1").get() == "receipt 1"

    with once_at(signals.begin_replied, own_server.kill):
        assert pay.delay("1").get() == "receipt 1"
    assert not own_server.running
