"""Waits for conditions, never for a guessed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

#: Longest wait for an expected event, in seconds, even on a busy machine.
SOON = 60.0
POLL_INTERVAL = 0.01

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "the condition", seconds: float = SOON) -> T:
    """Polls `condition` and returns its first true value.

    Raises:
        TimeoutError: there was none within `seconds`; the message names `what`.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_INTERVAL)
    return value


async def eventually_async(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SOON
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out: {what}"
        await asyncio.sleep(POLL_INTERVAL)
    return value
