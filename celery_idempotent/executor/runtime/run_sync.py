"""The driver of flows in a world that blocks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from celery_idempotent.executor.soft_limit import Interrupted, SoftLimit

T = TypeVar("T")


def run_sync(flow: Coroutine[Any, Any, T], limit: SoftLimit | None = None) -> T:
    """What `flow` returns, which runs in a world that blocks.

    Args:
        limit: that of the message which the flow is about; one that is still waiting in the end
            comes too late, and is dropped. Without it a soft time limit is somebody else's, and is
            raised in the end.
    """
    here = SoftLimit() if limit is None else limit
    try:
        here.enter()
        return _drive(flow)
    except Interrupted as stop:
        here.take()
        raise stop.error from None
    finally:
        here.leave()
        if limit is None and (struck := here.take()) is not None:
            raise struck


def _drive(flow: Coroutine[Any, Any, T]) -> T:
    try:
        flow.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    flow.close()
    raise RuntimeError("a flow among threads has awaited something of an event loop")
