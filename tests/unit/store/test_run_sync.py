"""Coroutines that block are run without an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from celery_idempotent.core.flow.thread import run_flow
from celery_idempotent.core.store import run_sync


@pytest.mark.parametrize("run", [lambda wait: run_sync(wait()), run_flow], ids=["store", "flow"])
def test_a_coroutine_that_waits_for_an_event_loop_is_closed_and_refused(run: Any) -> None:
    closed = []

    async def wait() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match="waits for an event loop"):
        run(wait)
    assert closed
