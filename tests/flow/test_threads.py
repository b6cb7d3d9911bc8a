"""``self.idempotency`` in threads that the body starts."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest
from celery import Celery

from celery_idempotent import IdempotencyError, IdempotentTask
from celery_idempotent.core.flow.execution import Execution
from tests.flow.deliveries import Deliveries, Make

Look = Callable[[], Execution]


def by_asyncio(look: Look) -> Execution:
    return asyncio.run(asyncio.to_thread(look))


def by_anyio(look: Look) -> Execution:
    return anyio.run(anyio.to_thread.run_sync, look)


def by_copied_context(look: Look) -> Execution:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, look).result()


def in_a_plain_thread(look: Look) -> Execution:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


def delivered(task: Make, app: Celery, body: Callable[[IdempotentTask], Any]) -> list[Any]:
    """Returns what `body` returns, or raises, in a delivery."""
    ends: list[Any] = []

    def run(self: IdempotentTask, order: str) -> None:
        try:
            ends.append(body(self))
        except Exception as error:
            ends.append(error)

    deliveries = Deliveries(app, made := task(run))
    assert deliveries.deliver(deliveries.publish("1")).state == "success"
    assert not made.idempotency.protected, "and nothing is left of it"
    return ends


@pytest.mark.parametrize("way", [by_asyncio, by_anyio, by_copied_context])
def test_a_thread_with_the_bodys_context_has_the_bodys_execution(
    task: Make, broker_app: Celery, way: Callable[[Look], Execution]
) -> None:
    def body(self: IdempotentTask) -> bool:
        seen = way(lambda: self.idempotency)
        seen.check()
        return seen is self.idempotency and seen.protected

    assert delivered(task, broker_app, body) == [True]


def test_a_plain_thread_is_refused(task: Make, broker_app: Celery) -> None:
    (error,) = delivered(task, broker_app, lambda self: in_a_plain_thread(lambda: self.idempotency))

    assert isinstance(error, IdempotencyError)
    assert "execution = self.idempotency" in str(error)


def test_a_plain_thread_that_is_handed_the_execution_has_it(task: Make, broker_app: Celery) -> None:
    def body(self: IdempotentTask) -> Any:
        execution = self.idempotency
        in_a_plain_thread(lambda: execution.check() or execution)
        return in_a_plain_thread(lambda: execution.step("book", lambda: 7))

    assert delivered(task, broker_app, body) == [7]


def protected(self: IdempotentTask) -> bool:
    return self.idempotency.protected


def test_a_plain_call_of_another_task_is_what_it_was(task: Make, broker_app: Celery) -> None:
    other = task(protected)

    def body(self: IdempotentTask) -> Any:
        return [other.run(), other(), in_a_plain_thread(other.run), by_asyncio(other.run)]

    assert delivered(task, broker_app, body) == [[False] * 4]


def test_a_plain_call_beside_an_eager_one_is_what_it_was(task: Make) -> None:
    """As in a web process: no worker, many threads."""
    started, end = threading.Event(), threading.Event()

    def body(self: IdempotentTask, order: str) -> bool:
        if order == "eager":
            started.set()
            end.wait(10)
        return self.idempotency.protected

    both = task(body)
    with ThreadPoolExecutor(1) as pool:
        eager = pool.submit(both.apply, ("eager",))
        started.wait(10)
        try:
            assert both.run("plain") is False
        finally:
            end.set()
        assert eager.result().get() is True
