"""Runs flows of many calls together: commands that they wait for share a round trip."""

from __future__ import annotations

from collections.abc import Generator
from types import coroutine
from typing import Any

from celery_idempotent.core.flow.pass_ import Pass
from celery_idempotent.core.store.commands import Command
from celery_idempotent.functions.bodies import Parts


@coroutine
def _wait_for(effect: Any) -> Generator[Any, Any, Any]:
    """Suspends a flow until `effect`, a command or a pause in seconds, is served."""
    return (yield effect)


class SharedRoundTrips:
    """The runtime of a flow while :class:`Together` runs it."""

    execute = execute_interruptible = sleep = staticmethod(_wait_for)

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class Together:
    """Some parts of flows.

    Args:
        ends: gets the end of each part, or the error that it raised.
    """

    def __init__(self, runtime: Any, parts: Parts, ends: dict[Pass, Any]) -> None:
        self._runtime, self._parts, self._ends = runtime, parts, ends
        self._left = dict.fromkeys(parts)

    async def run(self) -> None:
        """Runs the parts to their ends.

        Raises:
            BaseException: what a signal handler has raised. The parts have ended nevertheless.
        """
        try:
            await self._run(self._left)
        except GeneratorExit:
            raise
        except BaseException as error:
            await self._run(dict.fromkeys(self._left, error))
            raise
        for end in map(self._ends.get, self._parts):
            if isinstance(end, BaseException) and not isinstance(end, Exception):
                raise end

    async def _run(self, replies: dict[Pass, Any]) -> None:
        """Resumes each part with its reply, or an error, and serves what it waits for."""
        waiting: dict[Pass, Any] = {}
        while replies:
            for call, reply in tuple(replies.items()):
                effect = await self._resume(call, reply)
                if effect is not None:
                    waiting[call] = effect
            commands = {call: e for call, e in waiting.items() if isinstance(e, Command)}
            served = commands or dict(waiting)
            replies = dict(zip(served, await self._serve([*served.values()]), strict=True))
            for call in served:
                del waiting[call]

    async def _serve(self, effects: list[Any]) -> list[Any]:
        try:
            if effects and isinstance(effects[0], Command):
                return await self._runtime.execute_all(effects)  # type: ignore[no-any-return]
            if effects:
                await self._runtime.sleep(max(effects))
        except GeneratorExit:
            raise
        except BaseException as error:
            return [error] * len(effects)
        return [None] * len(effects)

    async def _resume(self, call: Pass, reply: Any) -> Any:
        """Runs a part until it waits for an effect, which is returned, or to its end."""
        part = self._parts[call]
        try:
            effect = part.throw(reply) if isinstance(reply, BaseException) else part.send(reply)
            while not isinstance(effect, (Command, float)):
                try:
                    reply = await _wait_for(effect)  # for the event loop; the others wait, too
                except Exception as error:
                    effect = part.throw(error)
                else:
                    effect = part.send(reply)
        except StopIteration as end:
            self._ends[call] = end.value
        except GeneratorExit:
            raise
        except BaseException as error:
            self._ends[call] = error
        else:
            return effect
        del self._left[call]
        return None
