"""``with idem.execution(key) as execution``: a code block that runs once for a key.

`engine.Block` is the context manager, and these classes are what ``as`` binds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.execution import AsyncExecution, BaseExecution, Execution
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.values import Answer, Failure, Outcome, Result
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import ConflictError, IdempotencyError
from celery_idempotent.functions.direct_call import (
    Decision,
    DirectHost,
    NotCompletedError,
    TwoPartFlows,
    current_execution,
    extensions_of_direct_call,
    outcome_of,
)

T = TypeVar("T")


class BaseBlockExecution(TwoPartFlows):
    """The execution of a block: its decision and, under RUN, its token and steps."""

    def __init__(self, data: CallData, host: DirectHost, runtime: Any, codec: PayloadCodec) -> None:
        super().__init__(runtime)
        #: ``name:digest``, as in the record.
        self.key = str(data.key)
        self.decision = Decision.CONFLICT
        #: Under CONFLICT, the error that names the execution with the key; None otherwise.
        self.conflict: ConflictError | None = None
        extensions = extensions_of_direct_call(data.settings)
        self._call = Call(data, host, runtime, codec, extensions)
        #: The execution, under RUN; else None.
        self._execution: BaseExecution | None = None
        #: The outcome of the key, under REPLAY or once the block has completed.
        self._outcome: Outcome | None = None
        #: The current execution before the block, and again after it.
        self._outer_execution = current_execution.get()

    @property
    def replay(self) -> Any:
        """Returns the stored value, or raises the stored error."""
        if self._outcome is None:
            raise IdempotencyError(f"{self.key} has no outcome: the decision is {self.decision}")
        return self._outcome.get()

    @property
    def token(self) -> int:
        """The fencing token: pass it to external systems, which should reject smaller ones."""
        return self._running.token

    @property
    def attempt(self) -> int:
        """1 plus the number of earlier executions that died."""
        return self._running.attempt

    @property
    def recovered(self) -> bool:
        """Whether this execution takes over from one that died and may have left effects."""
        return self._running.recovered

    @property
    def protected(self) -> bool:
        """False with ``enabled=False``, or if Redis was unavailable (``on_store_error="run"``)."""
        return self._running.protected

    @property
    def connection(self) -> Any:
        """The connection of the block's transaction; see :attr:`Execution.connection`."""
        return self._running.connection

    def check(self) -> None:
        """Checks, without a round trip, that no other execution can be running.

        Raises:
            LeaseLostError: if another execution has taken over, or may have done so by now.
        """
        self._running.check()

    @property
    def _running(self) -> BaseExecution:
        if self._execution is None:
            raise IdempotencyError(f"{self.key} is not to be run: the decision is {self.decision}")
        return self._execution

    def _after_begin(self) -> None:
        """Sets the decision, and makes the execution the current one."""
        end = self._ends[self._call]
        if end is None:
            assert self._call.grant is not None
            self.decision, self._execution = Decision.RUN, self._call.grant.execution
        else:
            outcome = outcome_of(self._call, end)
            if isinstance(end, Answer) and not end.refused:
                self.decision, self._outcome = Decision.REPLAY, outcome
            else:
                assert isinstance(outcome, Failure)
                if not isinstance(outcome.error, ConflictError):
                    raise outcome.error
                self.conflict = outcome.error
        current_execution.set(self._execution)

    async def _complete_key(self, value: Any) -> Any:
        """Completes the key with `value`; returns or raises its outcome."""
        _ = self._running  # raises unless the block is to run
        if self._outcome is not None:
            raise IdempotencyError(f"{self.key} is already completed; complete it only once")
        await self._complete({self._call: Result(value)})
        end = self._ends[self._call]
        assert end is not None
        self._outcome = outcome_of(self._call, end)
        return self._outcome.get()

    async def _exit(self, error: BaseException | None) -> None:
        current_execution.set(self._outer_execution)
        await self._end(error, error or NotCompletedError(self.key))


class BlockExecution(BaseBlockExecution):
    """The execution of a ``with`` block."""

    def complete(self, value: Any = None) -> Any:
        """Stores `value` and returns the key's outcome, which a replay will return.

        This is `value` as the serializer restores it (with JSON, a tuple becomes a list), or the
        outcome of another execution that took over. With ``store_result=False`` it is `value`.

        Raises:
            ResultNotStoredError: if `value` cannot be serialized. The key has completed without it.
            LeaseLostError: if another execution has taken over and is running.
            IdempotencyError: if the block is not to run, or has already completed.
        """
        return run_sync(self._complete_key(value))

    def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """As :meth:`Execution.step`."""
        execution = self._running
        assert isinstance(execution, Execution)
        return execution.step(name, func, *args, **kwargs)

    def __enter__(self) -> BlockExecution:
        try:
            run_sync(self._begin([self._call]))
            return self
        except BaseException as error:  # a signal handler can also raise after the begin
            run_sync(self._exit(error))
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        run_sync(self._exit(error))


class AsyncBlockExecution(BaseBlockExecution):
    """The execution of an ``async with`` block."""

    async def complete(self, value: Any = None) -> Any:
        """As :meth:`BlockExecution.complete`."""
        return await self._complete_key(value)

    @overload
    async def step(
        self, name: str, func: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
    ) -> T: ...

    @overload
    async def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    async def step(self, name: str, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`AsyncExecution.step`."""
        execution = self._running
        assert isinstance(execution, AsyncExecution)
        return await execution.step(name, func, *args, **kwargs)

    async def __aenter__(self) -> AsyncBlockExecution:
        await self._begin([self._call])
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self._exit(error)
