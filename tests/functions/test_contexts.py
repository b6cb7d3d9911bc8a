"""``with idem.execution(…)`` and ``async with idem.execution(…)``: the same tests for both."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest

from celery_idempotent import Decision, Idempotency, State, StoreUnavailableError, signals
from celery_idempotent.core.lease.heartbeat import heartbeat
from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import IdempotencyError, KeyReusedError, LeaseLostError, SettingsError
from celery_idempotent.functions.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.functions.block import BlockExecution
from tests.functions.conftest import abandon


class Blocking:
    """A blocking execution with the interface of an asynchronous one."""

    def __init__(self, execution: Any) -> None:
        self._execution = execution

    def __getattr__(self, name: str) -> Any:
        return getattr(self._execution, name)

    async def complete(self, value: Any = None) -> Any:
        return self._execution.complete(value)

    async def step(self, *args: Any) -> Any:
        return self._execution.step(*args)


pytestmark = pytest.mark.anyio

OpenContext = Callable[..., Any]


@pytest.fixture
def anyio_backend() -> str:
    """Runs coroutine functions with asyncio."""
    return "asyncio"


@pytest.fixture(params=["with", "async with"])
async def open_context(request: Any, idem: Idempotency) -> AsyncIterator[OpenContext]:
    """Opens ``with idem.execution(key)`` or ``async with idem.execution(key)``."""

    @asynccontextmanager
    async def open_execution(key: Any, engine: Idempotency = idem, **options: Any) -> Any:
        if request.param == "with":
            with engine.execution(key, **options) as execution:
                yield Blocking(execution)
        else:
            async with engine.execution(key, **options) as async_execution:
                yield async_execution

    yield open_execution
    await idem.aclose()


def state(idem: Idempotency, key: str) -> State | None:
    record = run_sync(idem.executor.store.get(idem.key_of(key)))
    return record and record.state


def no_lease_is_held() -> bool:
    return not heartbeat.leases() and not asyncio_heartbeat().leases()


async def test_the_first_block_runs_and_the_second_replays(
    open_context: OpenContext, idem: Idempotency, key: str
) -> None:
    async with open_context(key) as first:
        assert first.decision is Decision.RUN
        assert (first.token > 0, first.attempt, first.recovered) == (True, 1, False)
        first.check()
        assert idem.current.token == first.token
        assert await first.complete("charged") == "charged"
        with pytest.raises(IdempotencyError, match="already completed"):
            await first.complete("again")
    assert idem.current.token == 0
    async with open_context(key) as second:
        assert second.decision is Decision.REPLAY
        assert second.replay == "charged"
        with pytest.raises(IdempotencyError, match="not to be run: the decision is REPLAY"):
            await second.complete("again")
    assert no_lease_is_held()


@pytest.mark.parametrize("line", [1, 2])
def test_a_signal_before_the_block_releases_the_key(idem: Idempotency, key: str, line: int) -> None:
    code = BlockExecution.__enter__.__code__
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += frame.f_code is code and event == "line"
        if lines > line:  # not `try`, before which nothing is held
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt), idem.execution(key):
            pass
    finally:
        sys.settrace(before)

    assert state(idem, key) is None
    assert not heartbeat.leases()
    assert not idem.current.protected


@pytest.mark.parametrize("options", [{"wait_timeout": 0}, {"on_conflict": "raise"}], ids=repr)
async def test_a_held_key_is_a_conflict(open_context: OpenContext, key: str, options: Any) -> None:
    async with open_context(key) as first:
        async with open_context(key, **options) as second:
            assert second.decision is Decision.CONFLICT
            assert "is held by" in str(second.conflict)
            with pytest.raises(IdempotencyError, match="has no outcome"):
                _ = second.replay
        first.check()


async def test_a_block_that_does_not_complete_releases_its_key(
    open_context: OpenContext, idem: Idempotency, key: str
) -> None:
    async with open_context(key):
        pass
    assert state(idem, key) is None
    with pytest.raises(ValueError, match="declined"):
        async with open_context(key):
            raise ValueError("declined")
    assert state(idem, key) is None
    assert no_lease_is_held()


async def test_an_error_to_replay_is_the_outcome(open_context: OpenContext, key: str) -> None:
    with pytest.raises(ValueError, match="declined"):
        async with open_context(key, replay_errors=(ValueError,)):
            raise ValueError("declined")
    async with open_context(key) as second:
        assert second.decision is Decision.REPLAY
        with pytest.raises(ValueError, match="declined"):
            _ = second.replay


async def test_another_fingerprint_is_rejected(open_context: OpenContext, key: str) -> None:
    async with open_context(key, fingerprint={"amount": 1}) as first:
        await first.complete()
    async with open_context(key, fingerprint={"amount": 1}) as again:
        assert again.decision is Decision.REPLAY
    with pytest.raises(KeyReusedError):
        async with open_context(key, fingerprint={"amount": 2}):
            pytest.fail("unreachable")


@pytest.mark.parametrize("is_done", [False, True], ids=["it runs", "it has completed"])
async def test_a_completion_after_a_takeover_is_rejected(
    open_context: OpenContext, idem: Idempotency, key: str, is_done: bool
) -> None:
    async with open_context(key) as late:
        abandon(idem, key)
        async with open_context(key) as successor:
            assert successor.recovered
            assert successor.token > late.token
            if not is_done:
                with pytest.raises(LeaseLostError):
                    await late.complete("late")
            await successor.complete("the successor's")
            if is_done:
                assert await late.complete("late") == "the successor's"
    async with open_context(key) as third:
        assert third.replay == "the successor's"


async def test_finished_steps_are_not_repeated(open_context: OpenContext, key: str) -> None:
    done = []

    def reserve() -> Any:
        done.append("reserve")
        return ("r-1", {2: 3})

    for _ in range(2):
        async with open_context(key) as execution:  # without completing
            assert await execution.step("reserve", reserve) == ["r-1", {"2": 3}]

    assert done == ["reserve"]


@pytest.mark.filterwarnings("error")
async def test_repeated_and_lazy_steps_are_refused(open_context: OpenContext, key: str) -> None:
    async def reserve() -> str:
        return "r-1"

    def reserve_lazily() -> Any:
        yield "r-1"

    async with open_context(key) as execution:
        assert await execution.step("a", int) == 0
        with pytest.raises(IdempotencyError, match="step 'a' has run before"):
            await execution.step("a", int)
        for func in (reserve_lazily, lambda: reserve_lazily()):
            with pytest.raises(SettingsError, match="step 'b' returned a generator, whose"):
                await execution.step("b", func)
        if isinstance(execution, Blocking):
            with pytest.raises(SettingsError, match="step 'b' returned a coroutine, whose"):
                await execution.step("b", reserve)
        else:
            assert await execution.step("b", reserve) == "r-1"


async def test_on_store_error_applies_to_blocks(open_context: OpenContext) -> None:
    unavailable = Idempotency("redis://127.0.0.1:1", redis_timeout=0.2)

    with pytest.raises(StoreUnavailableError):
        async with open_context("k", unavailable):
            pytest.fail("unreachable")
    async with open_context("k", unavailable, on_store_error="run") as execution:
        assert (execution.decision, execution.protected) == (Decision.RUN, False)
        assert await execution.complete(1) == 1


async def test_signals_are_sent(
    open_context: OpenContext, idem: Idempotency, key: str, restored_receivers: None
) -> None:
    received = []

    def receive(signal: Any, sender: Any, **_: Any) -> None:
        received.append((signal, sender is idem))

    expected = [signals.begun, signals.completed, signals.replayed]
    for signal in expected:
        signal.connect(receive, weak=False)

    for _ in range(2):
        async with open_context(key) as execution:
            if execution.decision is Decision.RUN:
                await execution.complete()

    assert received == [(signal, True) for signal in expected]
