"""A lease that has expired before the process reads the reply that grants it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from celery_idempotent import ConflictError, IdempotentTask, StoreUnavailableError
from celery_idempotent.core.store import scripts
from tests.faults.proxy import Proxy
from tests.waiting import eventually

pytestmark = pytest.mark.exhaustive

Make = Callable[..., IdempotentTask]
BEGIN = scripts.load("begin").sha
LEASE = 1.2


def task_with_late_reply(task: Make, proxy: Proxy, runs: list[bool]) -> IdempotentTask:
    def body(self: IdempotentTask, order: str) -> str:
        runs.append(True)
        self.idempotency.check()
        return f"receipt of {order}, attempt {self.idempotency.attempt}"

    made = task(body, redis_url=proxy.url, lease=LEASE, redis_timeout=20.0)
    made.delay("the first")  # loads the script
    runs.clear()
    return made


def test_begin_is_sent_again_before_the_body_runs(
    task: Make, proxy: Proxy, sent_signals: list[str]
) -> None:
    runs: list[bool] = []
    made = task_with_late_reply(task, proxy, runs)
    sent_signals.clear()
    proxy.delay_reply(to=BEGIN, seconds=1.5 * LEASE)

    assert made.delay("1").result == "receipt of 1, attempt 1"
    assert runs == [True]
    assert sent_signals == ["begun", "completed"]


def test_an_execution_that_has_taken_over_runs_alone(task: Make, proxy: Proxy) -> None:
    runs: list[bool] = []
    made = task_with_late_reply(task, proxy, runs)
    receipts: list[str] = []
    proxy.delay_reply(to=BEGIN, seconds=2 * LEASE)
    late = threading.Thread(target=lambda: receipts.append(made.delay("1").result))
    late.start()
    eventually(lambda: made.idempotency_record("1") is not None)

    def take_over() -> bool:
        with contextlib.suppress(ConflictError):
            receipts.append(made.delay("1").result)
        return bool(receipts)

    eventually(take_over)
    late.join(20)

    assert receipts == ["receipt of 1, attempt 1"] * 2  # the body of the first had not begun
    assert runs == [True]


def test_a_redis_that_is_always_later_than_the_lease_is_as_good_as_none(
    task: Make, proxy: Proxy
) -> None:
    runs: list[bool] = []
    made = task_with_late_reply(task, proxy, runs)
    for _ in range(2):
        proxy.delay_reply(to=BEGIN, seconds=1.5 * LEASE)

    # An eager call cannot come back, so it says why it would have to.
    with pytest.raises(StoreUnavailableError, match="later than idempotency_lease"):
        made.delay("1")
    assert runs == []
    assert made.idempotency_record("1") is None
