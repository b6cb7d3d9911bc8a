"""Calls whose bodies are code of the caller: a block, or the code around a batch."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from celery_idempotent.core.flow.aio import AsyncioRuntime
from celery_idempotent.core.flow.flow import execute_from_body, execute_to_body
from celery_idempotent.core.flow.pass_ import Pass
from celery_idempotent.core.flow.thread import run_flow
from celery_idempotent.core.flow.values import End, Failure, Outcome

#: Parts of flows, see `flow.execute_to_body`.
Parts = Mapping[Pass, Coroutine[Any, Any, End | None]]


class Bodies:
    """Runs flows up to their bodies, and later from there to their ends.

    The methods of this class and its subclasses are coroutines. With a blocking runtime they never
    suspend, so :func:`.run_sync` can call them like functions.
    """

    #: The calls that were begun.
    _begun_calls: Sequence[Pass] = ()

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        #: How the flows have ended, or the errors that they raised; None for one at its body.
        self._ends: dict[Pass, End | BaseException | None] = {}

    def __del__(self) -> None:
        self._close()

    def _begun(self) -> None:
        """Called when all flows have reached their bodies or ended."""
        raise NotImplementedError

    async def _begin(self, calls: Sequence[Pass], reason: BaseException | None = None) -> None:
        """Begins `calls`; after an error or a cancellation, ends those that have begun.

        Args:
            reason: as for `_end`; by default the raised error.
        """
        self._begun_calls = calls
        try:
            await self._drive(lambda: self._run({call: execute_to_body(call) for call in calls}))
            self._begun()
        except BaseException as error:
            await self._end(error, reason or error)
            raise

    async def _complete(self, outcomes: Mapping[Pass, Outcome]) -> None:
        """Runs the flows of these calls, whose bodies have ended with `outcomes`, to their ends."""
        await self._drive(partial(self._settle, outcomes))

    async def _end(self, error: BaseException | None, reason: BaseException) -> None:
        """Ends the flows whose bodies have not completed.

        Args:
            error: the error that the caller's code raised, if any.
            reason: the error that their bodies end with.
        """
        end = partial(self._settle, dict.fromkeys(self._begun_calls, Failure(reason)))
        if isinstance(self._runtime, AsyncioRuntime) and isinstance(error, GeneratorExit):
            self._close()  # nothing can be awaited: the event loop is closed
        elif isinstance(self._runtime, AsyncioRuntime) and isinstance(error, CancelledError):
            await self._runtime.abandon(end())
        else:
            await self._drive(end)

    def _close(self) -> None:
        """Stops the renewal of the leases, without awaiting anything."""
        for call in self._begun_calls:
            if call.at_body:
                call.close()

    async def _settle(self, outcomes: Mapping[Pass, Outcome]) -> None:
        at_body = {call: outcome for call, outcome in outcomes.items() if call.at_body}
        await self._run({call: execute_from_body(call, at_body[call]) for call in at_body})

    async def _run(self, parts: Parts) -> None:
        """Runs these parts, and notes how they end."""
        for call, part in parts.items():
            self._ends[call] = await part

    async def _drive(self, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if isinstance(self._runtime, AsyncioRuntime):
            await self._runtime.drive(start())
        else:
            run_flow(start)
