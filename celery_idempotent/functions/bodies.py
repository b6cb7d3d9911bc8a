"""Calls whose bodies are code of the caller: a block, or the code around a batch."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.aio import AsyncioRuntime
from celery_idempotent.flow.lockstep import Handler, Lockstep
from celery_idempotent.flow.outcome import Outcome
from celery_idempotent.flow.thread import run_flow


class Bodies:
    """Runs flows up to their bodies, and later from there to their ends.

    The methods of this class and its subclasses are coroutines. With a blocking runtime they never
    suspend, so :func:`.run_sync` can call them like functions.
    """

    def __init__(self, runtime: Any, handlers: Mapping[str, Handler] | None = None) -> None:
        self._runtime = runtime
        self._flows = Lockstep(runtime, handlers)

    def _begun(self) -> None:
        """Called when all flows have reached their bodies or ended."""
        raise NotImplementedError

    def _begin_failed(self, error: BaseException) -> None:
        """Called with the error of a begin, before the begun flows are ended."""

    async def _begin(
        self, calls: Sequence[ActiveCall], reason: BaseException | None = None
    ) -> None:
        """Begins `calls`; after an error or a cancellation, ends those that have begun.

        Args:
            reason: as for `_end`; by default the raised error.
        """
        try:
            await self._drive(partial(self._flows.begin, calls))
            self._begun()
        except BaseException as error:
            self._begin_failed(error)
            await self._end(error, reason or error)
            raise

    async def _complete(self, outcomes: Mapping[ActiveCall, Outcome]) -> None:
        """Runs the flows of these calls, whose bodies have ended with `outcomes`, to their ends."""
        await self._drive(partial(self._flows.end, outcomes))

    async def _end(self, error: BaseException | None, reason: BaseException) -> None:
        """Ends the flows whose bodies have not completed.

        Args:
            error: the error that the caller's code raised, if any.
            reason: the error that their bodies end with.
        """
        end = partial(self._flows.end_all, reason)
        if isinstance(self._runtime, AsyncioRuntime) and isinstance(error, GeneratorExit):
            self._flows.close()  # nothing can be awaited: the event loop is closed
        elif isinstance(self._runtime, AsyncioRuntime) and isinstance(error, CancelledError):
            await self._runtime.abandon(end())
        else:
            await self._drive(end)

    async def _drive(self, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if isinstance(self._runtime, AsyncioRuntime):
            await self._runtime.drive(start())
        else:
            run_flow(start)
