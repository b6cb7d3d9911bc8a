"""The driver of flows in a world that blocks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(flow: Coroutine[Any, Any, T]) -> T:
    """What `flow` returns, which runs in a world that blocks."""
    try:
        flow.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    flow.close()
    raise RuntimeError("a flow among threads has awaited something of an event loop")
