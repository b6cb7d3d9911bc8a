"""The records in Redis; apart from `testing`, only this package imports redis-py."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs `coroutine`, which must never suspend, and returns its result.

    The coroutines of a store with a blocking transport block instead of suspending.

    Raises:
        RuntimeError: if the coroutine waits for an event loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("run_sync was given a coroutine that waits for an event loop")
