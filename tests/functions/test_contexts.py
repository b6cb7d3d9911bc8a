"""``with idem.execution(…)`` and ``async with``: one story, told in both worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from celery_idempotent import (
    Decision,
    Idempotency,
    IdempotencyError,
    KeyReusedError,
    LeaseLostError,
    State,
    StoreUnavailableError,
    signals,
)
from celery_idempotent.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.store import commands

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Plain:
    """The blocking execution, awaited like the other one."""

    def __init__(self, execution: Any) -> None:
        self._execution = execution

    def __getattr__(self, name: str) -> Any:
        return getattr(self._execution, name)

    async def complete(self, value: Any = None) -> Any:
        return self._execution.complete(value)

    async def step(self, *args: Any) -> Any:
        return self._execution.step(*args)


Open = Callable[..., Any]


@pytest.fixture(params=["with", "async with"])
def opened(request: pytest.FixtureRequest, idem: Idempotency) -> Open:
    """``async with opened(key)`` in either world."""

    @asynccontextmanager
    async def open_it(key: Any, engine: Idempotency = idem, **options: Any) -> Any:
        if request.param == "with":
            with engine.execution(key, **options) as execution:
                yield Plain(execution)
        else:
            async with engine.execution(key, **options) as other:
                yield other

    return open_it


def state(idem: Idempotency, key: str) -> State | None:
    record = idem.executor.store.get(idem.key_of(key))
    return record and record.state


def nothing_is_held() -> bool:
    return not heartbeat.held() and not asyncio_heartbeat().held()


def test_the_first_runs_and_the_second_replays(opened: Open, run: Run, key: str) -> None:
    async def story() -> None:
        async with opened(key) as first:
            assert first.decision is Decision.RUN
            assert (first.token > 0, first.attempt, first.recovered) == (True, 1, False)
            first.check()
            assert await first.complete("charged") == "charged"
        async with opened(key) as second:
            assert second.decision is Decision.REPLAY
            assert second.replay == "charged"
            with pytest.raises(IdempotencyError, match="not to be run: the decision is REPLAY"):
                await second.complete("again")
        assert nothing_is_held()

    run(story())


def test_a_key_that_is_held_is_a_decision(opened: Open, run: Run, key: str) -> None:
    async def story() -> None:
        async with opened(key) as first:
            async with opened(key, wait_timeout=0) as second:
                assert second.decision is Decision.CONFLICT
                assert "is held by" in str(second.conflict)
                with pytest.raises(IdempotencyError, match="has no outcome"):
                    _ = second.replay
            first.check()

    run(story())


def test_a_block_that_does_not_complete_gives_its_key_back(
    opened: Open, idem: Idempotency, run: Run, key: str
) -> None:
    async def story() -> None:
        async with opened(key):
            pass
        assert state(idem, key) is None
        with pytest.raises(ValueError, match="declined"):
            async with opened(key):
                raise ValueError("declined")
        assert state(idem, key) is None
        assert nothing_is_held()

    run(story())


def test_an_error_that_ends_the_key_is_its_outcome(opened: Open, run: Run, key: str) -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match="declined"):
            async with opened(key, replay_errors=(ValueError,)):
                raise ValueError("declined")
        async with opened(key) as second:
            assert second.decision is Decision.REPLAY
            with pytest.raises(ValueError, match="declined"):
                _ = second.replay

    run(story())


def test_another_fingerprint_is_refused(opened: Open, run: Run, key: str) -> None:
    async def story() -> None:
        async with opened(key, fingerprint={"amount": 1}) as first:
            await first.complete()
        async with opened(key, fingerprint={"amount": 1}) as again:
            assert again.decision is Decision.REPLAY
        with pytest.raises(KeyReusedError):
            async with opened(key, fingerprint={"amount": 2}):
                pytest.fail("unreachable")

    run(story())


def test_completing_twice_is_a_mistake(opened: Open, run: Run, key: str) -> None:
    async def story() -> None:
        async with opened(key) as execution:
            await execution.complete(1)
            with pytest.raises(IdempotencyError, match="already completed"):
                await execution.complete(2)

    run(story())


def test_a_late_completion_gives_the_rivals_outcome(
    opened: Open, idem: Idempotency, run: Run, key: str
) -> None:
    async def story() -> None:
        async with opened(key) as late:
            record = idem.executor.store.get(idem.key_of(key))
            assert record is not None
            idem.executor.store.execute(
                commands.abandon(idem.key_of(key), record.task_id, record.worker, grace_ms=0)
            )
            async with opened(key) as rival:
                assert rival.recovered
                assert rival.token > late.token
                with pytest.raises(LeaseLostError):
                    await late.complete("late")
                await rival.complete("the rival's")
        async with opened(key) as third:
            assert third.replay == "the rival's"

    run(story())


def test_steps_are_kept(opened: Open, run: Run, key: str) -> None:
    done = []

    def reserve() -> str:
        done.append("reserve")
        return "r-1"

    async def story() -> None:
        for _ in range(2):
            async with opened(key) as execution:  # and never completes
                assert await execution.step("reserve", reserve) == "r-1"

    run(story())
    assert done == ["reserve"]


def test_without_a_store_it_runs_if_that_is_the_policy(opened: Open) -> None:
    away = Idempotency("redis://127.0.0.1:1", redis_timeout=0.2)

    async def story() -> None:
        with pytest.raises(StoreUnavailableError):
            async with opened("k", away):
                pytest.fail("unreachable")
        async with opened("k", away, on_store_error="run") as execution:
            assert (execution.decision, execution.protected) == (Decision.RUN, False)
            assert await execution.complete(1) == 1

    asyncio.run(story())


def test_the_code_inside_sees_the_execution(
    opened: Open, idem: Idempotency, run: Run, key: str
) -> None:
    async def story() -> None:
        async with opened(key) as execution:
            assert idem.current.token == execution.token
        assert idem.current.token == 0

    run(story())


def test_signals_tell_of_it(opened: Open, idem: Idempotency, run: Run, key: str) -> None:
    heard = []

    def hear(signal: Any, sender: Any, **_: Any) -> None:
        heard.append((signal.name, sender is idem))

    for signal in (signals.begun, signals.completed, signals.replayed):
        signal.connect(hear, weak=False)

    async def story() -> None:
        for _ in range(2):
            async with opened(key) as execution:
                if execution.decision is Decision.RUN:
                    await execution.complete()

    try:
        run(story())
    finally:
        for signal in (signals.begun, signals.completed, signals.replayed):
            signal.disconnect(hear)
    names = ["idempotency_begun", "idempotency_completed", "idempotency_replayed"]
    assert heard == [(name, True) for name in names]


def test_a_cancelled_block_gives_its_key_back(idem: Idempotency, run: Run, key: str) -> None:
    async def block(inside: asyncio.Event) -> None:
        async with idem.execution(key):
            inside.set()
            await asyncio.sleep(20)

    async def story() -> None:
        inside = asyncio.Event()
        task = asyncio.create_task(block(inside))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert state(idem, key) is None

    run(story())
