"""Coroutines that block are run without an event loop."""

from __future__ import annotations

import asyncio

import pytest

from celery_idempotent.core.flow.thread import run_flow
from celery_idempotent.core.store import run_sync


def test_the_result_is_returned() -> None:
    async def add() -> int:
        return 1 + 2

    assert run_sync(add()) == 3


def test_an_error_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        run_sync(fail())


def test_a_coroutine_that_waits_for_an_event_loop_is_closed_and_refused() -> None:
    closed = []

    async def wait() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match="waits for an event loop"):
        run_sync(wait())
    assert closed


def test_a_flow_in_a_thread_returns_its_value() -> None:
    async def answer() -> int:
        return 42

    async def flow() -> int:
        return await answer()

    assert run_flow(flow) == 42


def test_a_flow_that_would_wait_is_a_mistake() -> None:
    async def waiting() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits for an event loop"):
        run_flow(waiting)
