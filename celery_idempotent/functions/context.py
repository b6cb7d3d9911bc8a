"""``with idem.execution(key) as execution``: a code block that runs once for a key."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from celery_idempotent.errors import ConflictError, IdempotencyError, LeaseLostError, SettingsError
from celery_idempotent.events.report import decide_by
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.execution import AsyncExecution, BaseExecution, Execution
from celery_idempotent.executor.executor import BeginRequest, begin, begin_transaction
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.returned import without_record
from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime
from celery_idempotent.executor.runtime.run_flow import run_flow
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.settle import settle
from celery_idempotent.functions.asyncio_flow import drive_begin, drive_end
from celery_idempotent.functions.decision import Decision, NotCompletedError
from celery_idempotent.functions.direct_call import DirectCall, current_execution
from celery_idempotent.key.key import Key
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.settings import Settings

if TYPE_CHECKING:
    from celery_idempotent.functions.engine import Idempotency

T = TypeVar("T")


class BaseContextExecution:
    """The execution of a block: its decision and, if the block is to run, its token and steps."""

    def __init__(self, call: DirectCall, runtime: Runtime, codec: PayloadCodec) -> None:
        #: ``name:digest``, as in the record.
        self.key = str(call.key)
        self.decision = Decision.CONFLICT
        #: Names the execution that holds the key, under CONFLICT.
        self.conflict: ConflictError | None = None
        self._call = call
        self._runtime = runtime
        self._codec = codec
        self._active: ActiveExecution | None = None
        self._execution: BaseExecution | None = None
        self._outcome: Outcome | None = None
        self._outer_execution: BaseExecution | None = None

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
        """1 for the first execution, plus 1 for each that died before this one."""
        return self._running.attempt

    @property
    def recovered(self) -> bool:
        """Whether this execution takes over from one that died, and may have left effects."""
        return self._running.recovered

    @property
    def protected(self) -> bool:
        """False if Redis was unavailable and ``on_store_error="run"`` applies."""
        return self._running.protected

    @property
    def connection(self) -> Any:
        """The connection of the block's transaction, as :attr:`Execution.connection`."""
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

    async def _begin(self) -> None:
        request = BeginRequest(self._call, self._runtime, self._codec)
        try:
            admission = await begin(request)
            if self._call.settings.transaction is not None and not isinstance(
                admission, (Result, Failure)
            ):
                admission = await begin_transaction(request, admission)
        except ConflictError as error:
            self.conflict = error
            return
        except GeneratorExit:
            raise  # nothing can be awaited: the event loop is closed
        except BaseException as error:
            decide_by(self._call, error)
            await request.give_back()
            raise
        if isinstance(admission, ActiveExecution):
            self.decision, self._execution = Decision.RUN, admission.execution
            self._active = admission
        elif isinstance(admission, BaseExecution):
            self.decision, self._execution = Decision.RUN, admission
        else:
            self.decision, self._outcome = Decision.REPLAY, admission

    async def _complete(self, value: Any) -> Outcome:
        _ = self._running  # the block is to run
        if self._outcome is not None:
            raise IdempotencyError(f"{self.key} is already completed; complete it only once")
        outcome: Outcome = Result(value)
        if self._active is not None:
            outcome = await self._settle(outcome)
        else:
            outcome = without_record(self._call, outcome, self._codec)
        self._outcome = outcome
        return outcome

    async def _end(self, error: BaseException | None) -> None:
        """Releases the key, or stores `error`, unless the block has completed."""
        if self._active is not None:
            with contextlib.suppress(LeaseLostError):
                await self._settle(Failure(error or NotCompletedError(self.key)))

    async def _settle(self, outcome: Outcome) -> Outcome:
        active, self._active = self._active, None
        assert active is not None
        try:
            return await settle(active, outcome)
        finally:
            active.finish()
            active.roll_back(discard=True)

    def _stop_renewal(self) -> None:
        if self._active is not None:
            self._active.finish()

    def _enter_block(self) -> None:
        self._outer_execution = current_execution.get()
        current_execution.set(self._execution)

    def _leave_block(self) -> None:
        current_execution.set(self._outer_execution)


class ContextExecution(BaseContextExecution):
    """The execution of a ``with`` block."""

    def complete(self, value: Any = None) -> Any:
        """Stores `value` and returns the key's outcome: what a replay will return.

        That is `value` as the serializer restores it (under JSON a tuple becomes a list), or the
        outcome of another execution that has taken over. With ``store_result=False`` it is `value`.

        Raises:
            ResultNotStoredError: if `value` cannot be serialized. The key has completed without it.
            LeaseLostError: if another execution has taken over and is running.
            IdempotencyError: if the block is not to run, or has already completed.
        """
        return run_flow(partial(self._complete, value)).get()

    def step(self, name: str, func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """As :meth:`Execution.step`."""
        execution = self._running
        assert isinstance(execution, Execution)
        return execution.step(name, func, *args, **kwargs)

    def __enter__(self) -> ContextExecution:
        try:
            run_flow(self._begin)
            self._enter_block()
            return self
        except BaseException as error:
            if current_execution.get() is self._execution:
                self._leave_block()
            run_flow(partial(self._end, error))
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave_block()
        run_flow(partial(self._end, error))


class AsyncContextExecution(BaseContextExecution):
    """The execution of an ``async with`` block."""

    _runtime: AsyncioRuntime

    async def complete(self, value: Any = None) -> Any:
        """As :meth:`ContextExecution.complete`."""
        outcome = await self._runtime.drive(self._complete(value))
        return outcome.get()

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

    async def __aenter__(self) -> AsyncContextExecution:
        await drive_begin(self._runtime, self._begin(), self._end, self._stop_renewal)
        self._enter_block()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave_block()
        await drive_end(self._runtime, self._end(error), self._stop_renewal, error)


class ExecutionContext:
    """The context manager of one block, for ``with`` and ``async with``.

    A block that ends without :meth:`~ContextExecution.complete` releases its key.
    """

    def __init__(self, engine: Idempotency, key: Key, settings: Settings, label: str = "") -> None:
        self._engine = engine
        self._call = DirectCall(engine, key, settings, label=label, app=engine._app)  # noqa: SLF001
        self._execution: Any = None

    def __enter__(self) -> ContextExecution:
        executor = self._engine.executor
        self._execution = ContextExecution(self._call, executor.runtime, executor.codec)
        return self._execution.__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        self._execution.__exit__(*error)

    async def __aenter__(self) -> AsyncContextExecution:
        if self._call.settings.transaction is not None:
            raise SettingsError(
                f"{self._engine.name}: idempotency_transaction needs `with`, not `async with`, "
                "since its connection blocks"
            )
        executor = self._engine.async_executor
        runtime = AsyncioRuntime(executor.store)
        self._execution = AsyncContextExecution(self._call, runtime, executor.codec)
        return await self._execution.__aenter__()  # type: ignore[no-any-return]

    async def __aexit__(self, *error: object) -> None:
        await self._execution.__aexit__(*error)
