"""``with idem.execution(key) as execution:`` for code that wants the pieces of the gate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from celery_idempotent.errors import ConflictError, IdempotencyError, LeaseLostError
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.async_executor import AsyncExecutor
from celery_idempotent.executor.call import Disposition, Release
from celery_idempotent.executor.execution import AsyncExecution, BaseExecution, Execution
from celery_idempotent.executor.executor import BeginRequest, Executor, begin
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime
from celery_idempotent.executor.runtime.run_sync import run_sync
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.settle import settle
from celery_idempotent.functions.call import DirectCall, current_execution
from celery_idempotent.functions.decision import Decision, NotCompletedError
from celery_idempotent.key.key import Key
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.settings import Settings

T = TypeVar("T")


class ContextCall(DirectCall):
    """The call that a block is."""

    def disposition(self, error: BaseException) -> Disposition:
        """As of any call; a block that says nothing gives its key back."""
        if isinstance(error, NotCompletedError):
            return Release()
        return super().disposition(error)


class _Execution:
    """What the block sees, whichever world it runs in."""

    def __init__(self, call: ContextCall, runtime: Runtime) -> None:
        #: ``name:digest``, as in the record.
        self.key = str(call.key)
        self.decision = Decision.CONFLICT
        #: Who holds the key, if someone else does.
        self.conflict: ConflictError | None = None
        self._call = call
        self._runtime = runtime
        self._running: ActiveExecution | None = None
        self._execution: BaseExecution | None = None
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
    def _run(self) -> BaseExecution:
        if self._execution is None:
            raise IdempotencyError(f"{self.key} is not to be run: the decision is {self.decision}")
        return self._execution

    async def _begin(self, codec: PayloadCodec) -> None:
        begin_request = BeginRequest(self._call, self._runtime, codec)
        try:
            admission = await begin(begin_request)
        except ConflictError as error:
            self.conflict = error
            return
        except GeneratorExit:
            raise  # the loop is gone: nothing can be awaited any more
        except BaseException:
            await begin_request.give_back()
            raise
        if isinstance(admission, ActiveExecution):
            self.decision, self._execution = Decision.RUN, admission.execution
            self._running = admission
        elif isinstance(admission, BaseExecution):
            self.decision, self._execution = Decision.RUN, admission
        else:
            self.decision, self._outcome = Decision.REPLAY, admission

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
            self._running.finish()

    async def _settle(self, outcome: Outcome) -> Outcome:
        active, self._running = self._running, None
        assert active is not None
        try:
            return await settle(active, outcome)
        finally:
            active.finish()


class ContextExecution(_Execution):
    """The execution that ``with idem.execution(…)`` gives."""

    def complete(self, value: Any = None) -> Any:
        """Store `value`, and return the outcome that counts: a rival's, if one came first.

        Raises:
            LeaseLostError: if someone else has taken over and runs.
            IdempotencyError: if there is nothing to complete.
        """
        return run_sync(self._complete(value)).get()

    def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """As :meth:`Execution.step`."""
        execution = self._run
        assert isinstance(execution, Execution)
        return execution.step(name, func, *args, **kwargs)


class AsyncContextExecution(_Execution):
    """The execution that ``async with idem.execution(…)`` gives."""

    _runtime: AsyncioRuntime

    async def complete(self, value: Any = None) -> Any:
        """As :meth:`BlockExecution.complete`."""
        outcome = await self._runtime.drive(self._complete(value))
        return outcome.get()

    async def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`AsyncExecution.step`."""
        execution = self._run
        assert isinstance(execution, AsyncExecution)
        return await execution.step(name, func, *args, **kwargs)


E = TypeVar("E", bound=_Execution)


class ExecutionContext:
    """One block of code behind the gate. It is not interrupted when its lease is lost.

    A block that ends without :meth:`~BlockExecution.complete` gives its key back.
    """

    def __init__(
        self,
        sender: Any,
        executors: tuple[Callable[[], Executor], Callable[[], AsyncExecutor]],
        key: Key,
        settings: Settings,
    ) -> None:
        self._call = ContextCall(sender, key, replace(settings, on_lease_lost="finish"))
        self._gates = executors
        self._here: _Execution
        self._around: BaseExecution | None = None

    def __enter__(self) -> ContextExecution:
        executor = self._gates[0]()
        execution = ContextExecution(self._call, executor.runtime)
        try:
            run_sync(execution._begin(executor.codec))  # noqa: SLF001
            return self._entered(execution)
        except BaseException as error:
            run_sync(execution._end(error))  # noqa: SLF001
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._left()
        run_sync(self._here._end(error))  # noqa: SLF001

    async def __aenter__(self) -> AsyncContextExecution:
        executor = self._gates[1]()
        runtime = AsyncioRuntime(executor.store)
        execution = AsyncContextExecution(self._call, runtime)
        try:
            await runtime.drive(execution._begin(executor.codec))  # noqa: SLF001
        except asyncio.CancelledError as cancelled:
            await runtime.abandon(execution._end(cancelled))  # noqa: SLF001
            raise
        return self._entered(execution)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._left()
        assert isinstance(self._here, AsyncContextExecution)
        runtime = self._here._runtime  # noqa: SLF001
        if isinstance(error, GeneratorExit):
            self._here._abandon()  # noqa: SLF001 - the loop is gone: nothing can be awaited
        elif isinstance(error, asyncio.CancelledError):
            await runtime.abandon(self._here._end(error))  # noqa: SLF001
        else:
            await runtime.drive(self._here._end(error))  # noqa: SLF001

    def _entered(self, execution: E) -> E:
        self._here = execution
        self._around = current_execution.get()
        current_execution.set(execution._execution)  # noqa: SLF001
        return execution

    def _left(self) -> None:
        current_execution.set(self._around)
