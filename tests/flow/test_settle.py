"""Executions that have lost their lease or whose store is unavailable."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from threading import Timer
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import OperationalError
from redis import Redis

from celery_idempotent import IdempotentTask, LeaseLostError, State, StoreUnavailableError
from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.task.publish import kept_message, put_back
from celery_idempotent.testing import IsolatedRecords
from tests.flow.deliveries import Make, Offer, begin_elsewhere, record_of
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import SECOND
from tests.waiting import eventually


def lose_to_one_that_ends(task: IdempotentTask, order: str, idempotency: IsolatedRecords) -> None:
    idempotency.expire_lease(task, order)
    assert task.delay(order).get(disable_sync_subtasks=False) == "the other's"


def lose_to_one_that_runs(task: IdempotentTask, order: str, idempotency: IsolatedRecords) -> None:
    idempotency.expire_lease(task, order)
    begin_elsewhere(task, order)


def wait_for_loss(task: IdempotentTask) -> None:
    """Waits until the heartbeat has found that the lease is lost."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        task.idempotency.check()
        time.sleep(0.01)
    pytest.fail("the heartbeat has not noticed")


def fail(task: IdempotentTask, *_: str) -> None:
    raise ValueError("its own")


def keep_a_step(task: IdempotentTask) -> None:
    task.idempotency.step("book", str, "booked")


@pytest.mark.parametrize("end", ["returns", "raises", "raises for good", "checks"])
def test_an_execution_gives_way_to_another_that_has_completed(
    task: Make, idempotency: IsolatedRecords, sent: list[str], end: str
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        if self.idempotency.recovered:
            return "the other's"
        lose_to_one_that_ends(slow, order, idempotency)
        if end == "checks":
            wait_for_loss(self)
        if end != "returns":
            raise ValueError("late")
        return "late"

    slow = task(body, replay_errors=(ValueError,) if end == "raises for good" else ())

    assert slow.delay("1").get() == "the other's"
    signals = ["begun", "begun", "completed", "lease_lost"]
    eventually(lambda: sent == signals, "the heartbeat has reported the loss")


class TestAnotherExecutionRuns:
    @pytest.mark.parametrize("end", ["returns", "raises", "checks", "exits"])
    def test_the_late_one_comes_back_for_its_outcome(
        self, task: Make, idempotency: IsolatedRecords, end: str
    ) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            lose_to_one_that_runs(slow, order, idempotency)
            if end == "checks":
                wait_for_loss(self)
            if end in ("raises", "exits"):
                raise ValueError("late") if end == "raises" else SystemExit(3)
            return "late"

        slow = task(body)

        # An eager call cannot come back, so it says why it would have to.
        with pytest.raises(SystemExit if end == "exits" else LeaseLostError):
            slow.delay("1")
        record = slow.idempotency_record("1")
        assert (record.state, record.task_id) == (State.STARTED, "the other")

    def test_the_result_of_a_replacement_is_awaited(
        self, app: Celery, task: Make, idempotency: IsolatedRecords
    ) -> None:
        app.conf.task_store_eager_result = True  # else Celery would rather not be asked for any

        def body(self: IdempotentTask, order: str) -> str:
            idempotency.expire_lease(slow, order)
            complete_by_replacement(slow, order)
            return "late"

        slow = task(body)

        with pytest.raises(LeaseLostError):
            slow.delay("1")


class TestNobodyHolds:
    @pytest.mark.parametrize("is_forgotten", [True, False], ids=["forgotten", "overwritten"])
    def test_an_execution_without_its_record_keeps_its_own_result(
        self, task: Make, client: Redis, sent: list[str], is_forgotten: bool
    ) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            if is_forgotten:
                assert slow.idempotency_forget(order, force=True)
            else:
                client.set(f"idem:{self.idempotency.key}", "something else")
            return "its own"

        slow = task(body)

        assert slow.delay("1").get() == "its own"
        found = client.get(f"idem:{slow.idempotency_key_of('1')}")
        assert found == (None if is_forgotten else b"something else")
        if is_forgotten:
            # The heartbeat may have found the loss first, and be about to report it.
            eventually(lambda: sent == ["begun", "lease_lost"], "the loss is reported")

    def test_an_execution_that_was_abandoned_and_stops_frees_nothing(
        self, task: Make, idempotency: IsolatedRecords
    ) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            if self.idempotency.recovered:
                return "taken over"
            idempotency.expire_lease(slow, order)
            wait_for_loss(self)
            return "unreachable"

        slow = task(body)

        with pytest.raises(LeaseLostError):
            slow.delay("1")
        assert slow.delay("1").get() == "taken over"


def test_an_execution_that_stops_because_of_its_lease_comes_back(offer: Offer) -> None:
    """The lease was not extended in time, but later, and no other execution has begun."""

    def body(self: IdempotentTask, order: str) -> str:
        self.request.id, lease = "renamed", self.idempotency._protection.lease
        runs.append(order)
        lease.trusted_until *= len(runs) - 1
        try:
            self.idempotency.check()
        finally:
            lease.renewed(lease_now())
        return order

    runs: list[str] = []
    deliveries = offer(body)
    message = deliveries.publish("order")

    assert deliveries.deliver(message).state == "ignored"
    again = deliveries.received()
    assert again.id == message.id
    assert deliveries.deliver(again).state == "success"
    assert len(runs) == 2


def at_settle(task: IdempotentTask, action: Callable[[], Any], nth: int = 1) -> list[None]:
    """Runs `action` before the outcome is sent for the `nth` time; returns the attempts so far."""
    runtime = task.idempotency_configuration.executor.runtime
    execute, tries = runtime.execute, []

    def act_and_execute(command: Command) -> Coroutine[Any, Any, Reply]:
        if command.script.name == "settle":
            tries.append(None)
            if len(tries) == nth:
                action()
        return execute(command)

    runtime.execute = act_and_execute  # type: ignore[method-assign]
    return tries


@pytest.fixture
def soft_limit() -> Iterator[Callable[[], None]]:
    """A soft time limit as Celery implements it: a signal whose handler raises."""

    def trigger(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, trigger)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


class TestTheStoreIsAway:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize("trusted", [True, False], ids=["in the lease", "after the lease"])
    def test_a_result_is_tried_again(
        self, task: Make, own_server: RedisServer, sent: list[str], trusted: bool
    ) -> None:
        """After the lease, too: no other execution can have taken over without a store."""

        def body(self: IdempotentTask, order: str) -> str:
            own_server.kill()
            if not trusted:
                with pytest.raises(LeaseLostError):
                    wait_for_loss(self)
            return "kept in the end"

        slow = task(body, redis_url=own_server.url, **({"lease": 60} if trusted else {}))
        tries = at_settle(slow, own_server.restart, nth=2)

        assert slow.delay("1").get() == "kept in the end"
        assert len(tries) >= 2
        assert sent == ["begun", "completed"]
        assert slow.idempotency_record("1").result == "kept in the end"

    def test_a_result_that_the_server_refuses_is_given_up_after_a_lease(
        self, task: Make, own_server: RedisServer, sent: list[str]
    ) -> None:
        """The heartbeat gets through, so the lease never ends."""

        def body(self: IdempotentTask, order: str) -> str:
            return "x" * 2_000_000

        with own_server.client() as client:
            client.config_set("proto-max-bulk-len", "1mb")
        large = task(body, redis_url=own_server.url, lease=1, max_result_size=10_000_000)

        assert len(large.delay("1").get()) == 2_000_000
        assert sent == ["begun", "outcome_unsaved"]

    def test_a_key_is_freed_once_redis_replies(self, task: Make, own_server: RedisServer) -> None:
        """The error of a living process counts as no death, even for ``max_attempts=1``."""

        def body(self: IdempotentTask, order: str) -> None:
            own_server.pause()
            Timer(1.5, own_server.resume).start()
            raise ValueError(order)

        failing = task(body, redis_url=own_server.url, redis_timeout=0.5, max_attempts=1, lease=10)

        for _ in range(2):
            with pytest.raises(ValueError, match="1"):
                failing.delay("1")
            assert failing.idempotency_record("1") is None

    @pytest.mark.parametrize("error", [SoftTimeLimitExceeded, SystemExit])
    def test_an_interruption_meanwhile_loses_no_result(
        self,
        task: Make,
        sent: list[str],
        soft_limit: Callable[[], None],
        error: type[BaseException],
    ) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            return "kept in the end"

        def interrupt() -> None:
            soft_limit() if error is SoftTimeLimitExceeded else sys.exit(3)

        slow = task(body)
        at_settle(slow, interrupt)

        # An eager call has the limit of the call around it; it is raised when the result is stored.
        with pytest.raises(error):
            slow.delay("1")
        assert sent == ["begun", "completed"]
        assert slow.idempotency_record("1").result == "kept in the end"

    @pytest.mark.parametrize(
        ("act", "error"),
        [
            (fail, ValueError),
            pytest.param(wait_for_loss, LeaseLostError, marks=pytest.mark.exhaustive),
            pytest.param(keep_a_step, StoreUnavailableError, marks=pytest.mark.exhaustive),
        ],
    )
    def test_the_error_of_a_body_is_raised_though_the_key_cannot_be_given_back(
        self,
        task: Make,
        own_server: RedisServer,
        sent: list[str],
        act: Callable[[IdempotentTask], None],
        error: type[Exception],
    ) -> None:
        def body(self: IdempotentTask, order: str) -> None:
            own_server.kill()
            act(self)

        slow = task(body, redis_url=own_server.url)

        with pytest.raises(error):
            slow.delay("1")
        assert sent == ["begun"]


def complete_by_replacement(task: IdempotentTask, order: str) -> None:
    """Stores what a task stores that has replaced itself by the task `SECOND`."""
    assert record_of(task, order).delegate(begin_elsewhere(task, order), 1).case == "ok"


@pytest.mark.parametrize("error", [ValueError("no card"), StopIteration("no card")])
def test_the_error_of_a_replacement_is_unchanged(app: Celery, task: Make, error: Exception) -> None:
    def body(self: IdempotentTask, order: str) -> Any:
        raise AssertionError

    app.conf.task_store_eager_result = True
    charge = task(body, replay_errors=(type(error),))
    complete_by_replacement(charge, "1")
    app.backend.mark_as_failure(SECOND, error)

    with pytest.raises(type(error)) as caught:
        charge.delay("1")
    assert caught.value.args == ("no card",)


def test_a_rerun_without_store_stays_a_rerun(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [ValueError("for good")]

    def body(self: IdempotentTask, order: str) -> str:
        if errors:
            raise errors.pop()
        return "paid"

    async def get(key: Key) -> Record:
        raise StoreUnavailableError("away")

    deliveries = offer(body, options={"idempotency_replay_errors": (ValueError,)})
    configuration = deliveries.task.idempotency_configuration
    key = deliveries.task.idempotency_key_of("1")
    message = deliveries.publish("1")
    assert deliveries.deliver(message).state == "failure"
    record = deliveries.task.idempotency_record("1")
    kept = kept_message.find(deliveries.task, key, message.id)
    assert record is not None
    assert kept is not None
    kept_message.publish(kept, key, record.token)

    with monkeypatch.context() as patch:
        patch.setattr(configuration.executor.store, "get", get)
        assert deliveries.deliver(deliveries.received()).state == "ignored"

    assert deliveries.deliver(deliveries.received()).state == "success"


def test_a_retry_keeps_the_key_from_publishers_though_its_body_has_returned(offer: Offer) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        self.retry(throw=False, countdown=60)
        return order

    deliveries = offer(body, options={"idempotency_dedupe_publish": True})
    message = deliveries.delivered("1")

    assert deliveries.app.AsyncResult(message.id).state == "SUCCESS"
    assert deliveries.task.delay("1").id == message.id


def test_a_message_that_cannot_be_put_back_is_requeued(offer: Offer, monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OperationalError("the broker is away")

    deliveries = offer(fail)
    message = deliveries.publish("1")
    begin_elsewhere(deliveries.task, "1")
    monkeypatch.setattr(put_back, "REQUEUE_PAUSE", 0.01)
    monkeypatch.setattr(deliveries.app.amqp, "send_task_message", refuse)

    assert deliveries.deliver(message).state == "requeued"
