"""``with idem.execution(key) as execution:`` for code that wants the pieces of the gate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from celery_idempotent.errors import ConflictError, IdempotencyError, LeaseLostError
from celery_idempotent.executor.active_execution import Running
from celery_idempotent.executor.async_executor import AsyncGate
from celery_idempotent.executor.call import Release, Verdict
from celery_idempotent.executor.execution import AnyExecution, AsyncExecution, Execution
from celery_idempotent.executor.executor import Admission, Gate, begin
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.runtime.asyncio import Loop
from celery_idempotent.executor.runtime.run_sync import at_once
from celery_idempotent.executor.runtime.runtime import World
from celery_idempotent.executor.settle import settle
from celery_idempotent.functions.call import DirectCall, under_way
from celery_idempotent.functions.decision import Decision, NotCompletedError
from celery_idempotent.key.key import Key
from celery_idempotent.payload.codec import Payloads
from celery_idempotent.settings import Settings

T = TypeVar("T")


class BlockCall(DirectCall):
    """The call that a block is."""

    def verdict(self, error: BaseException) -> Verdict:
        """As of any call; a block that says nothing gives its key back."""
        if isinstance(error, NotCompletedError):
            return Release()
        return super().verdict(error)


class _Execution:
    """What the block sees, whichever world it runs in."""

    def __init__(self, call: BlockCall, world: World) -> None:
        #: ``name:digest``, as in the record.
        self.key = str(call.key)
        self.decision = Decision.CONFLICT
        #: Who holds the key, if someone else does.
        self.conflict: ConflictError | None = None
        self._call = call
        self._world = world
        self._running: Running | None = None
        self._execution: AnyExecution | None = None
        self._outcome: Outcome | None = None

    @property
    def replay(self) -> Any:
        """The outcome that the key has: the value, or the error raised."""
        if self._outcome is None:
            raise IdempotencyError(f"{self.key} has no outcome: the decision is {self.decision}")
        return self._outcome.get()

    @property
    def token(self) -> int:
        """Fencing token: hand it to the system downstream, and let that refuse smaller ones."""
        return self._run.token

    @property
    def attempt(self) -> int:
        """1 for the first execution, one more for each that died before this one."""
        return self._run.attempt

    @property
    def recovered(self) -> bool:
        """Whether this takes over from an execution that died: look what it left behind."""
        return self._run.recovered

    @property
    def protected(self) -> bool:
        """False where the store could not be asked, under ``on_store_error="run"``."""
        return self._run.protected

    def check(self) -> None:
        """Make sure, without a round trip, that nobody else can be running.

        Raises:
            LeaseLostError: if another execution has taken over, or may have by now.
        """
        self._run.check()

    @property
    def _run(self) -> AnyExecution:
        if self._execution is None:
            raise IdempotencyError(f"{self.key} is not to be run: the decision is {self.decision}")
        return self._execution

    async def _begin(self, payloads: Payloads) -> None:
        admission = Admission(self._call, self._world, payloads)
        try:
            standing = await begin(admission)
        except ConflictError as error:
            self.conflict = error
            return
        except GeneratorExit:
            raise  # the loop is gone: nothing can be awaited any more
        except BaseException:
            await admission.give_back()
            raise
        if isinstance(standing, Running):
            self.decision, self._execution = Decision.RUN, standing.execution
            self._running = standing
        elif isinstance(standing, AnyExecution):
            self.decision, self._execution = Decision.RUN, standing
        else:
            self.decision, self._outcome = Decision.REPLAY, standing

    async def _complete(self, value: Any) -> Outcome:
        execution = self._run
        if self._outcome is not None:
            raise IdempotencyError(f"{self.key} is completed already")
        outcome: Outcome = Result(value)
        if execution.protected:
            outcome = await self._settle(outcome)
        self._outcome = outcome
        return outcome

    async def _end(self, error: BaseException | None) -> None:
        if self._running is not None:
            with contextlib.suppress(LeaseLostError):
                await self._settle(Failure(error or NotCompletedError(self.key)))

    def _abandon(self) -> None:
        if self._running is not None:
            self._running.over()

    async def _settle(self, outcome: Outcome) -> Outcome:
        running, self._running = self._running, None
        assert running is not None
        try:
            return await settle(running, outcome)
        finally:
            running.over()


class BlockExecution(_Execution):
    """The execution that ``with idem.execution(…)`` gives."""

    def complete(self, value: Any = None) -> Any:
        """Store `value`, and return the outcome that counts: a rival's, if one came first.

        Raises:
            LeaseLostError: if someone else has taken over and runs.
            IdempotencyError: if there is nothing to complete.
        """
        return at_once(self._complete(value)).get()

    def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """As :meth:`Execution.step`."""
        execution = self._run
        assert isinstance(execution, Execution)
        return execution.step(name, func, *args, **kwargs)


class AsyncBlockExecution(_Execution):
    """The execution that ``async with idem.execution(…)`` gives."""

    _world: Loop

    async def complete(self, value: Any = None) -> Any:
        """As :meth:`BlockExecution.complete`."""
        outcome = await self._world.drive(self._complete(value))
        return outcome.get()

    async def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`AsyncExecution.step`."""
        execution = self._run
        assert isinstance(execution, AsyncExecution)
        return await execution.step(name, func, *args, **kwargs)


E = TypeVar("E", bound=_Execution)


class Block:
    """One block of code behind the gate. It is not interrupted when its lease is lost.

    A block that ends without :meth:`~BlockExecution.complete` gives its key back.
    """

    def __init__(
        self,
        sender: Any,
        gates: tuple[Callable[[], Gate], Callable[[], AsyncGate]],
        key: Key,
        settings: Settings,
    ) -> None:
        self._call = BlockCall(sender, key, replace(settings, on_lease_lost="finish"))
        self._gates = gates
        self._here: _Execution
        self._around: AnyExecution | None = None

    def __enter__(self) -> BlockExecution:
        gate = self._gates[0]()
        execution = BlockExecution(self._call, gate.world)
        try:
            at_once(execution._begin(gate.payloads))  # noqa: SLF001
            return self._entered(execution)
        except BaseException as error:
            at_once(execution._end(error))  # noqa: SLF001
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._left()
        at_once(self._here._end(error))  # noqa: SLF001

    async def __aenter__(self) -> AsyncBlockExecution:
        gate = self._gates[1]()
        world = Loop(gate.store)
        execution = AsyncBlockExecution(self._call, world)
        try:
            await world.drive(execution._begin(gate.payloads))  # noqa: SLF001
        except asyncio.CancelledError as cancelled:
            await world.abandon(execution._end(cancelled))  # noqa: SLF001
            raise
        return self._entered(execution)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._left()
        assert isinstance(self._here, AsyncBlockExecution)
        world = self._here._world  # noqa: SLF001
        if isinstance(error, GeneratorExit):
            self._here._abandon()  # noqa: SLF001 - the loop is gone: nothing can be awaited
        elif isinstance(error, asyncio.CancelledError):
            await world.abandon(self._here._end(error))  # noqa: SLF001
        else:
            await world.drive(self._here._end(error))  # noqa: SLF001

    def _entered(self, execution: E) -> E:
        self._here = execution
        self._around = under_way.get()
        under_way.set(execution._execution)  # noqa: SLF001
        return execution

    def _left(self) -> None:
        under_way.set(self._around)
