"""An outcome that too few replicas have is written again while the lease lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, State, StoreUnavailableError
from tests.servers.redis_server import RedisServer

Make = Callable[..., IdempotentTask]

#: Seconds; a replica that follows has it long before.
WAIT = 1.0


@pytest.fixture(scope="module")
def running_replica(server: RedisServer) -> Iterator[RedisServer]:
    with RedisServer.start(replica_of=server) as replica:
        yield replica


@pytest.fixture
def replica(running_replica: RedisServer) -> Iterator[RedisServer]:
    yield running_replica
    running_replica.resume()


@pytest.fixture
def app(app: Celery) -> Celery:
    app.conf.update(idempotency_wait_replicas=1, idempotency_redis_timeout=4 * WAIT)
    return app


@pytest.mark.exhaustive
def test_it_is_not_lost_when_the_replica_thaws(
    task: Make, replica: RedisServer, sent_signals: list[str]
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        replica.pause()
        # Not before the first complete has been waited for in vain.
        threading.Timer(1.5 * WAIT, replica.resume).start()
        return "done"

    patient = task(body, lease=30.0)

    assert patient.delay("1").get() == "done"
    assert sent_signals == ["begun", "completed"]


def test_it_is_given_up_when_the_lease_ends(
    task: Make, replica: RedisServer, sent_signals: list[str]
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        replica.pause()
        return "done"

    hasty = task(body, lease=0.6)

    assert hasty.delay("1").get() == "done"
    assert sent_signals == ["begun", "outcome_unsaved"]
    record: Any = hasty.idempotency_record("1")
    assert record.state is State.COMPLETED, "the master has it, and may yet lose it"


def test_a_begin_that_they_do_not_have_runs_nothing(
    task: Make, replica: RedisServer, sent_signals: list[str]
) -> None:
    def body(self: IdempotentTask, order: str) -> None:
        pytest.fail("it runs")

    strict = task(body, on_store_error="raise")
    replica.pause()

    with pytest.raises(StoreUnavailableError, match="only 0 of 1 replicas within"):
        strict.delay("1").get()
    assert sent_signals == []
