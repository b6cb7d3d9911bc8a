"""Runs the flows of many calls in step, and leaves their bodies to the caller.

Each flow runs until it awaits an effect. Effects of one kind are then served together: one round
trip begins all keys of a batch, and another completes them. A flow that has reached its body stays
there until the caller has run the body.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from types import coroutine
from typing import Any, NamedTuple

from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.end import End
from celery_idempotent.flow.execution import BaseExecution
from celery_idempotent.flow.flow import execute
from celery_idempotent.flow.outcome import Failure, Outcome
from celery_idempotent.flow.runtime import Runtime
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

BODY, STORE, SLEEP = "body", "store", "sleep"

#: Serves the effects of one kind: returns a reply or an error for each.
Handler = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class Effect(NamedTuple):
    """An effect that a flow awaits."""

    kind: str
    value: Any


@coroutine
def await_effect(kind: str, value: Any) -> Generator[Effect, Any, Any]:
    """Suspends the flow until the effect is served; returns the reply."""
    return (yield Effect(kind, value))


@coroutine
def _await_in_loop(future: Any) -> Generator[Any, Any, Any]:
    """Suspends all flows while one of them waits for the event loop."""
    return (yield future)


class SteppedRuntime:
    """The runtime of one flow in step with others. Its body and steps use the real runtime.

    Args:
        together: whether the commands of the flow are sent together with those of other flows.
    """

    def __init__(self, runtime: Runtime, *, together: bool) -> None:
        self._runtime = runtime
        self._together = together
        #: Whether the caller is running the body.
        self._at_body = False
        self.store = runtime.store
        self.execution: Callable[..., BaseExecution] = runtime.execution
        self.drive_step = runtime.drive_step
        self.wait_for_change = runtime.wait_for_change
        self.start_renewal = runtime.start_renewal
        self.stop_renewal = runtime.stop_renewal

    async def execute(self, command: Command) -> Reply:
        """Returns the reply of the store."""
        if self._together and not self._at_body:
            return await await_effect(STORE, command)  # type: ignore[no-any-return]
        return await self._runtime.execute(command)

    async def execute_interruptible(self, command: Command) -> Reply:
        """As `execute`; a soft time limit interrupts a begin that is sent alone."""
        if self._together:
            return await self.execute(command)
        return await self._runtime.execute_interruptible(command)

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        if self._together and not self._at_body:
            await await_effect(SLEEP, seconds)
        else:
            await self._runtime.sleep(seconds)

    async def run(self, func: Callable[[], Any]) -> Outcome:
        """Returns the outcome of the body, which the caller runs; inside it, of a step."""
        if self._at_body:
            return await self._runtime.run(func)
        self._at_body = True
        try:
            return await await_effect(BODY, None)  # type: ignore[no-any-return]
        finally:
            self._at_body = False


class Lockstep:
    """The flows of some calls.

    Args:
        runtime: a `BlockingRuntime` or an `AsyncioRuntime`.
        handlers: handlers of additional effects, by kind. These effects are served last, when no
            flow has a command to send.
    """

    def __init__(self, runtime: Any, handlers: Mapping[str, Handler] | None = None) -> None:
        self._runtime = runtime
        self._handlers: dict[str, Handler] = {STORE: self._send, SLEEP: self._sleep}
        self._handlers |= handlers or {}
        self._flows: dict[ActiveCall, Coroutine[Any, Any, End]] = {}
        #: The effects that the flows await.
        self._waiting: dict[ActiveCall, Effect] = {}
        #: The calls whose flows have reached their bodies.
        self.at_body: set[ActiveCall] = set()
        #: The end of every other flow, or the error that it raised.
        self.ends: dict[ActiveCall, End | BaseException] = {}
        #: The last error of each handler since the last `begin` or `end`.
        self.errors: dict[str, Exception] = {}

    async def begin(self, calls: Sequence[ActiveCall]) -> None:
        """Runs the flows of `calls` until each has ended or reached its body.

        The runtime of each call must be a `SteppedRuntime`.
        """
        self._flows = {call: execute(call) for call in calls}
        await self._run(dict.fromkeys(calls))

    async def end(self, outcomes: Mapping[ActiveCall, Outcome]) -> None:
        """Runs the flows of these calls, whose bodies ended with `outcomes`, to their ends."""
        self.at_body -= outcomes.keys()
        await self._run(outcomes)

    async def end_all(self, error: BaseException) -> None:
        """Runs all flows that are at their bodies to their ends, as if these raised `error`."""
        await self.end(dict.fromkeys(tuple(self.at_body), Failure(error)))

    def close(self) -> None:
        """Ends the flows without awaiting anything, since their event loop is closed."""
        for flow in self._flows.values():
            flow.close()

    async def _run(self, values: Mapping[ActiveCall, Any]) -> None:
        self.errors.clear()
        try:
            for call, value in values.items():
                await self._step(call, self._flows[call].send, value)
            await self._serve()
        except GeneratorExit:
            raise
        except BaseException as error:
            # A signal handler raised it: each flow gives its key back.
            for call in values.keys() - self.ends.keys() - self.at_body:
                self._waiting.pop(call, None)
                await self._step(call, self._flows[call].throw, error)
            await self._serve()
            raise
        for call in values:
            end = self.ends.get(call)
            if isinstance(end, BaseException) and not isinstance(end, Exception):
                raise end

    async def _serve(self) -> None:
        while effects := self._waiting:
            kinds = {effect.kind for effect in effects.values()}
            kind = next(kind for kind in self._handlers if kind in kinds)
            waiting = {call: each.value for call, each in effects.items() if each.kind == kind}
            replies: Sequence[Any]
            try:
                replies = await self._handlers[kind]([*waiting.values()])
            except Exception as error:
                self.errors[kind] = error
                replies = [error] * len(waiting)
            for call, reply in zip(waiting, replies, strict=True):
                del effects[call]
                flow = self._flows[call]
                resume = flow.throw if isinstance(reply, BaseException) else flow.send
                await self._step(call, resume, reply)

    async def _step(self, call: ActiveCall, resume: Callable[[Any], Any], value: Any) -> None:
        """Runs a flow until it awaits an effect or ends."""
        flow = self._flows[call]
        try:
            effect = resume(value)
            while not isinstance(effect, Effect):
                try:
                    value = await _await_in_loop(effect)
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(value)
        except StopIteration as end:
            self.ends[call] = end.value
        except GeneratorExit:
            raise
        except BaseException as error:
            self.ends[call] = error
        else:
            if effect.kind == BODY:
                self.at_body.add(call)
            else:
                self._waiting[call] = effect

    async def _send(self, commands: Sequence[Command]) -> Sequence[Any]:
        replies: Sequence[Any] = await self._runtime.execute_all(commands)
        return replies

    async def _sleep(self, seconds: Sequence[float]) -> Sequence[None]:
        await self._runtime.sleep(max(seconds))
        return [None] * len(seconds)
