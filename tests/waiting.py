"""Waits for conditions, never for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
