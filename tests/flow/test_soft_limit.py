"""A soft time limit at every line that a delivery executes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pytest
from billiard.pool import soft_timeout_sighandler
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import ConflictError, IdempotentTask, State
from celery_idempotent.core.lease.heartbeat import heartbeat
from tests.flow.deliveries import Deliveries, End, Make, SignalAtLine, begin_elsewhere
from tests.servers.redis_server import RedisServer


@pytest.fixture(autouse=True)
def soft_limit() -> Iterator[None]:
    """Celery's own handler, as in a pool child."""
    before = signal.signal(signal.SIGUSR1, soft_timeout_sighandler)
    yield
    signal.signal(signal.SIGUSR1, before)


class Story:
    """One call that is interrupted: its task, its record and the broker."""

    #: Whether its store is available.
    has_store = True

    def __init__(self, task: Make, app: Celery, **options: Any) -> None:
        self.runs: list[str] = []
        self.error: Exception | None = None

        def body(task: IdempotentTask, order: str) -> str:
            self.runs.append(order)
            if self.error is not None:
                raise self.error
            return f"receipt of {order}"

        self.task = task(body, **options)
        self.task.acks_late = True
        self.deliveries = Deliveries(app, self.task)
        # The first delivery of a child wraps Celery's handler.
        self.deliveries.deliver(self.deliveries.publish("the first"))
        self.runs.clear()

    @property
    def record(self) -> Any:
        return self.task.idempotency_record("1") if self.has_store else None

    def held_by_another(self) -> None:
        begin_elsewhere(self.task, "1")

    def forget(self) -> None:
        self.error = None
        if self.has_store:
            self.task.idempotency_forget("1", force=True)
        self.runs.clear()
        while self.deliveries.next() is not None:
            pass

    def trigger(self, at: int) -> tuple[SignalAtLine, End]:
        message = self.deliveries.publish("1")
        self.id = message.id
        injected = SignalAtLine(at)
        with injected.armed():
            end = self.deliveries.deliver(message)
        return injected, end

    def result(self) -> Any:
        return self.task.AsyncResult(self.id).get(timeout=1)

    def assert_put_back(self, end: End) -> None:
        """The message is in the broker, and runs to its end once the key is free."""
        assert end.state == "ignored"
        again = self.deliveries.next()
        assert again is not None, "it was put back"
        assert self.deliveries.next() is None, "it was put back once"
        assert again.id == self.id
        if self.has_store:
            self.task.idempotency_forget("1", force=True)
            assert self.deliveries.deliver(again).state == "success"
            assert self.result() == "receipt of 1"
            assert self.runs == ["1"]


def each_line(test: Any) -> Any:
    """Marks a test that takes long, and shares nothing with others."""
    return pytest.mark.exhaustive(pytest.mark.slow(pytest.mark.xdist_group(test)))


class Sweep:
    """Raises at the first line, the second, and so on, and checks how each call ends."""

    def __init__(self, story: Story, prepare: Callable[[], Any] = lambda: None) -> None:
        self._story = story
        self._prepare = prepare
        self.ends: dict[str, str] = {}

    def run(self, judge: Callable[[End], None]) -> None:
        at = 0
        while True:
            at += 1
            self._story.forget()
            self._prepare()
            injected, end = self._story.trigger(at)
            if not injected.where:
                break
            self.ends[injected.where] = end.state
            try:
                assert heartbeat.leases() == ()
                if isinstance(end.error, SoftTimeLimitExceeded):
                    self.judge_raised(injected.where)
                else:
                    judge(end)
            except AssertionError as error:
                error.add_note(f"line {at}, {injected.where}: {end}, {self._story.record}")
                raise
        assert at > 100, "the sweep covers the flow"

    def judge_raised(self, where: str) -> None:
        """Judges a call that has raised the limit itself, at its first line or in its body."""
        assert self._story.record is None


@each_line
def test_a_run(task: Make, broker_app: Celery) -> None:
    story = Story(task, broker_app)

    def judge(end: End) -> None:
        assert end.state == "success"
        assert story.runs == ["1"]
        assert story.result() == story.record.result == "receipt of 1"

    sweep = Sweep(story)
    sweep.run(judge)

    # The limit is raised if it is reached before the end of the body, and else dropped.
    assert [end for end, _ in groupby(sweep.ends.values())] == ["failure", "success"]


@each_line
def test_a_run_that_keeps_steps(task: Make, broker_app: Celery) -> None:
    """A limit that is reached while a step is stored is raised in the body, after the step."""
    story = Story(task, broker_app)
    booked: list[str] = []
    after: list[str] = []

    def body(task: IdempotentTask, order: str) -> str:
        story.runs.append(order)
        try:
            task.idempotency.step("book", booked.append, order)
        except SoftTimeLimitExceeded:
            after.append("interrupted in the step")
            raise
        return f"receipt of {order}"

    def judge(end: End) -> None:
        assert end.state == "success"
        assert story.result() == "receipt of 1"

    def judge_raised(where: str) -> None:
        assert story.record is None or story.record.state is State.RESERVED
        if booked:
            again = story.deliveries.publish("1")
            assert story.deliveries.deliver(again).state == "success"
            assert booked.count("1") == (1 if story.record.attempt == 1 else 2)

    story.task.run = body.__get__(story.task)
    sweep = Sweep(story, booked.clear)
    sweep.judge_raised = judge_raised  # type: ignore[method-assign]
    sweep.run(judge)

    assert after


@each_line
def test_a_replay(task: Make, broker_app: Celery) -> None:
    story = Story(task, broker_app)

    def complete() -> None:
        assert story.deliveries.deliver(story.deliveries.publish("1")).state == "success"

    def judge(end: End) -> None:
        assert end.state == "success"
        assert story.result() == "receipt of 1"
        assert story.runs == ["1"]

    sweep = Sweep(story, complete)
    sweep.run(judge)
    assert {*sweep.ends.values()} == {"success"}


@pytest.mark.parametrize("policy", ["retry", "raise"])
@each_line
def test_a_conflict(task: Make, broker_app: Celery, policy: str) -> None:
    story = Story(task, broker_app, on_conflict=policy)

    def judge(end: End) -> None:
        assert story.record.task_id == "the other"
        if policy == "raise":
            assert isinstance(end.error, ConflictError)
        else:
            story.assert_put_back(end)

    Sweep(story, story.held_by_another).run(judge)


@pytest.mark.parametrize("replayed", [False, True])
@each_line
def test_an_error_of_the_body_stays(task: Make, broker_app: Celery, replayed: bool) -> None:
    options = {"replay_errors": (ValueError,)} if replayed else {}
    story = Story(task, broker_app, **options)

    def fail() -> None:
        story.error = ValueError("no such order")

    def judge(end: End) -> None:
        assert type(end.error) is ValueError
        assert story.runs == ["1"]
        record = story.record
        assert (record.state if replayed else record) == (State.FAILED if replayed else None)

    Sweep(story, fail).run(judge)


@each_line
def test_a_store_that_is_away(task: Make, broker_app: Celery) -> None:
    # On a socket: another server could be started on the port of one that is gone.
    with RedisServer.start(config={}, unix_socket=True) as gone:
        story = Story(task, broker_app, redis_url=gone.url)
        gone.kill()
    story.has_store = False

    def judge(end: End) -> None:
        story.assert_put_back(end)
        assert story.runs == []

    Sweep(story).run(judge)


def test_a_value_whose_serialisation_takes_too_long_is_kept(task: Make, broker_app: Celery) -> None:
    """The limit is not an error of the serializer."""
    story = Story(task, broker_app)

    class Slow(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return super().items()

    story.task.run = lambda order: Slow(order=order)
    message = story.deliveries.publish("1")

    assert story.deliveries.deliver(message).state == "success"
    assert story.record.result == {"order": "1"}
    duplicate = story.deliveries.publish("1")
    assert story.deliveries.deliver(duplicate).state == "success"


class TestCelerysOwnLines:
    """Before and after the executor."""

    @pytest.fixture
    def message_of(self, broker_app: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Publishes a message that is interrupted in a method of the result backend, once."""

        def publish(story: Story, method: str) -> Any:
            story.forget()
            message = story.deliveries.publish("1")
            story.id = message.id
            original = getattr(broker_app.backend, method)

            def slow(*args: Any, **options: Any) -> Any:
                monkeypatch.undo()
                signal.raise_signal(signal.SIGUSR1)
                return original(*args, **options)

            monkeypatch.setattr(broker_app.backend, method, slow)
            return message

        return publish

    def test_before_the_executor_it_is_raised_in_place_of_the_body(
        self, task: Make, broker_app: Celery, message_of: Any
    ) -> None:
        failures: list[Any] = []

        def on_failure(_: IdempotentTask, error: Exception, *__: Any) -> None:
            failures.append(error)

        with patch.object(IdempotentTask, "on_failure", on_failure):
            story = Story(task, broker_app)
            story.task.track_started = True
            end = story.deliveries.deliver(message_of(story, "store_result"))

        assert isinstance(end.error, SoftTimeLimitExceeded)
        assert failures == [end.error], "as in plain Celery"
        assert (story.runs, story.record) == ([], None)

    def test_after_the_executor_the_outcome_stays(
        self, task: Make, broker_app: Celery, message_of: Any
    ) -> None:
        story = Story(task, broker_app)

        assert story.deliveries.deliver(message_of(story, "mark_as_done")).state == "success"
        assert story.result() == "receipt of 1"


class TestInTheBody:
    @pytest.mark.parametrize("options", [{}, {"idempotency_key": False}], ids=["", "unprotected"])
    def test_it_is_raised(self, task: Make, broker_app: Celery, options: dict[str, Any]) -> None:
        story = Story(task, broker_app)
        story.task.run = lambda order: signal.raise_signal(signal.SIGUSR1)

        end = story.deliveries.deliver(story.deliveries.publish("1", **options))

        assert isinstance(end.error, SoftTimeLimitExceeded)
        assert story.record is None

    def test_in_an_inner_call_it_is_raised_outside(self, task: Make, broker_app: Celery) -> None:
        """The inner call's outcome is stored; then the limit is raised where it was called."""
        story, inner = Story(task, broker_app), Story(task, broker_app)
        payload = inner.task.idempotency_configuration.executor.codec
        encode = payload.encode_result
        caught: list[str] = []

        async def interrupt_and_encode(*args: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return await encode(*args, **options)

        def body(order: str) -> str:
            payload.encode_result = interrupt_and_encode
            try:
                inner.task.apply((order,), throw=True)
            except SoftTimeLimitExceeded:
                caught.append(order)
                raise
            finally:
                payload.encode_result = encode
            return "unreachable"

        story.task.run = body
        end = story.deliveries.deliver(story.deliveries.publish("1"))

        assert inner.record.result == "receipt of 1"
        assert isinstance(end.error, SoftTimeLimitExceeded)
        assert caught == ["1"]
