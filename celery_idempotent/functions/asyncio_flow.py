"""Begins and ends executions whose code runs on an event loop and may be cancelled."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Sequence

from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.aio import AsyncioRuntime
from celery_idempotent.flow.lockstep import Lockstep
from celery_idempotent.functions.decision import NotCompletedError


async def drive_begin(
    runtime: AsyncioRuntime, flows: Lockstep, calls: Sequence[ActiveCall]
) -> None:
    """Runs `calls` to their bodies; if that fails or is cancelled, ends whatever has begun."""
    try:
        await runtime.drive(flows.begin(calls))
    except BaseException as error:
        await drive_end(runtime, flows, error)
        raise


async def drive_end(runtime: AsyncioRuntime, flows: Lockstep, error: BaseException | None) -> None:
    """Ends the flows whose bodies have not completed.

    Args:
        error: with which the caller's code has ended, if with any.
    """
    if isinstance(error, GeneratorExit):
        flows.close()  # nothing can be awaited: the event loop is closed
        return
    end = flows.end_all(error or NotCompletedError("the block or batch has ended"))
    if isinstance(error, CancelledError):
        await runtime.abandon(end)
    else:
        await runtime.drive(end)
