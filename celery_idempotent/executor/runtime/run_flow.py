"""Runs a flow in a thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from celery_idempotent.executor.soft_limit import Interrupted, SoftLimit

T = TypeVar("T")


def run_flow(start: Callable[[], Coroutine[Any, Any, T]], limit: SoftLimit | None = None) -> T:
    """Runs a flow, which must not be suspended, and returns its value.

    Args:
        start: creates the flow. No signal handler can raise between that and its first line.
        limit: of the message that the flow belongs to. If it is still pending at the end it is
            dropped, since the message has ended. Without one, a soft time limit belongs to a call
            around this one, and is raised at the end.
    """
    own = SoftLimit() if limit is None else limit
    try:
        own.enter()
        flow = start()
        flow.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    except Interrupted as interrupted:
        own.take()
        raise interrupted.error from None
    finally:
        own.leave()
        if limit is None and (error := own.error) is not None:
            raise error
    flow.close()
    raise RuntimeError("a flow in a thread has awaited something of an event loop")
