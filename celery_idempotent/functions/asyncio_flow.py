"""Begins and ends executions whose code runs on an event loop and may be cancelled."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from typing import Any

from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime

Flow = Coroutine[Any, Any, Any]


async def drive_begin(
    runtime: AsyncioRuntime,
    begin: Flow,
    end: Callable[[BaseException], Flow],
    stop_renewal: Callable[[], None],
) -> None:
    """Drives `begin`; if that fails or is cancelled, ends whatever has begun.

    Args:
        end: makes the flow that ends it, from the error.
        stop_renewal: stops the renewal of its leases.
    """
    try:
        await runtime.drive(begin)
    except BaseException as error:
        await drive_end(runtime, end(error), stop_renewal, error)
        raise


async def drive_end(
    runtime: AsyncioRuntime,
    end: Flow,
    stop_renewal: Callable[[], None],
    error: BaseException | None,
) -> None:
    """Drives `end` after the caller's code has ended with `error`, or without one."""
    if isinstance(error, GeneratorExit):
        end.close()  # nothing can be awaited: the event loop is closed
        stop_renewal()
    elif isinstance(error, CancelledError):
        await runtime.abandon(end)
    else:
        await runtime.drive(end)
