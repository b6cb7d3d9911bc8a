"""A flow in a thread runs without being suspended."""

from __future__ import annotations

import types
from collections.abc import Generator

import pytest

from celery_idempotent.flow.thread import run_flow


async def answer() -> int:
    return 42


@types.coroutine
def suspend() -> Generator[None, None, None]:
    yield


async def flow() -> int:
    return await answer()


async def waiting() -> None:
    await suspend()


def test_it_returns_what_the_flow_returns() -> None:
    assert run_flow(flow) == 42


def test_one_that_would_wait_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="awaited something of an event loop"):
        run_flow(waiting)
