"""Faults of the store around a begin: a late reply, a loss, and replicas that do not have it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from celery.utils.dispatch import Signal

from celery_idempotent import ConflictError, IdempotentTask, State, StoreUnavailableError, signals
from celery_idempotent.core.store import scripts
from tests.faults.proxy import Proxy
from tests.flow.deliveries import Make
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

# The lease has expired before the process reads the reply that grants it.

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


@pytest.mark.exhaustive
def test_begin_is_resent_before_the_body(task: Make, proxy: Proxy, sent: list[str]) -> None:
    runs: list[bool] = []
    made = task_with_late_reply(task, proxy, runs)
    sent.clear()
    proxy.delay_reply(to=BEGIN, seconds=1.5 * LEASE)

    assert made.delay("1").result == "receipt of 1, attempt 1"
    assert runs == [True]
    assert sent == ["begun", "completed"]


def test_an_execution_that_has_taken_over_runs_alone(task: Make, proxy: Proxy) -> None:
    runs: list[bool] = []
    made = task_with_late_reply(task, proxy, runs)
    receipts: list[str] = []
    proxy.delay_reply(to=BEGIN, seconds=2 * LEASE)
    late = threading.Thread(target=lambda: receipts.append(made.delay("1").result))
    late.start()
    eventually(lambda: made.idempotency_record("1") is not None)

    def take_over() -> bool:
        with suppress(ConflictError):
            receipts.append(made.delay("1").result)
        return bool(receipts)

    eventually(take_over)
    late.join(20)

    assert receipts == ["receipt of 1, attempt 1"] * 2  # the body of the first had not begun
    assert runs == [True]


@pytest.mark.exhaustive
def test_a_redis_that_is_later_than_the_lease_is_as_good_as_none(task: Make, proxy: Proxy) -> None:
    runs: list[bool] = []
    made = task_with_late_reply(task, proxy, runs)
    for _ in range(2):
        proxy.delay_reply(to=BEGIN, seconds=1.5 * LEASE)

    # An eager call cannot come back, so it says why it would have to.
    with pytest.raises(StoreUnavailableError, match="later than idempotency_lease"):
        made.delay("1")
    assert runs == []
    assert made.idempotency_record("1") is None


# The store is lost between the reply to a begin and the body, or the replay.


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
    task: Make, own_server: RedisServer, sent: list[str], back: bool
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
    assert sent == ["begun", "completed" if back else "outcome_unsaved"]
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


# An outcome that too few replicas have is written again while the lease lasts.

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
def waiting(task: Make) -> Make:
    """Tasks whose writes wait for a replica."""
    return partial(task, wait_replicas=1, redis_timeout=4 * WAIT)


@pytest.mark.exhaustive
def test_it_is_not_lost_when_it_thaws(waiting: Make, replica: RedisServer, sent: list[str]) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        replica.pause()
        # Not before the first complete has been waited for in vain.
        threading.Timer(1.5 * WAIT, replica.resume).start()
        return "done"

    patient = waiting(body, lease=30.0)

    assert patient.delay("1").get() == "done"
    assert sent == ["begun", "completed"]


def test_it_is_given_up_with_its_lease(
    waiting: Make, replica: RedisServer, sent: list[str]
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        replica.pause()
        return "done"

    hasty = waiting(body, lease=0.6)

    assert hasty.delay("1").get() == "done"
    assert sent == ["begun", "outcome_unsaved"]
    record: Any = hasty.idempotency_record("1")
    assert record.state is State.COMPLETED, "the master has it, and may yet lose it"


def test_a_begin_that_they_do_not_have_runs_nothing(
    waiting: Make, replica: RedisServer, sent: list[str]
) -> None:
    def body(self: IdempotentTask, order: str) -> None:
        pytest.fail("it runs")

    strict = waiting(body, on_store_error="raise")
    replica.pause()

    with pytest.raises(StoreUnavailableError, match="only 0 of 1 replicas within"):
        strict.delay("1").get()
    assert sent == []
