"""Waiting for what must come, never for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

#: Longest wait for something that is about to happen, in seconds: on a busy machine, too.
SOON = 60.0
POLL_INTERVAL = 0.01

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "it came", seconds: float = SOON) -> T:
    """The first true value of `condition`; `what` says in the error what did not happen."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s still not: {what}")
        time.sleep(POLL_INTERVAL)
    return value
