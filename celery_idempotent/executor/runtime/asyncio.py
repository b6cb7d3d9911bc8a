"""The world of code on an event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from celery_idempotent.errors import IdempotencyError, LeaseLostError
from celery_idempotent.executor.execution import AsyncExecution
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.key.key import Key
from celery_idempotent.lease.asyncio_heartbeat import AsyncioHeartbeat, asyncio_heartbeat
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store.async_record_store import AsyncRecordStore
from celery_idempotent.store.commands import Command
from celery_idempotent.store.per_loop import PerLoop
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a cancelled caller waits for its key to be given back, or its outcome to be stored.
CANCEL_TIMEOUT = 1.0


class AsyncioRuntime:
    """Everything is awaited; one for each execution, block or batch.

    A flow runs in a task of its own, which nothing cancels: a command that is cut off leaves open
    whether it was executed. The task that calls it, the caller, runs its work and waits for its
    end. Where the caller is cancelled, the flow gets to know and ends as soon as it can: a key that
    has been granted is given back, an outcome that is being stored is stored. The caller waits for
    that, but not for long, and not if it is cancelled again.
    """

    def __init__(self, store: AsyncRecordStore) -> None:
        self.store = store
        self._heartbeat: AsyncioHeartbeat | None = None
        #: Flows whose callers have been cancelled.
        self._abandoned: set[_Flow] = set()

    async def drive(self, flow: Coroutine[Any, Any, T]) -> T:
        """What `flow` returns; it begins when those have ended that were abandoned before."""
        value: T = await self._driven(_Flow(flow, frozenset(self._abandoned)))
        return value

    async def drive_step(self, flow: Coroutine[Any, Any, T]) -> T:
        """What `flow` returns, which is a step of the execution under way; steps wait for none."""
        value: T = await self._driven(_Flow(flow, is_step=True))
        return value

    async def _driven(self, flow: _Flow) -> Any:
        try:
            await _first_of(flow, flow.work)
            if flow.work.done():
                outcome = await _run(*flow.work.result())
                flow.outcome.set_result(outcome)
                if isinstance(outcome, Failure) and isinstance(outcome.error, CancelledError):
                    outcome.get()
                await asyncio.wait({flow})
        except CancelledError as error:
            flow.end_soon(error)
            await self._abandon(flow)
            raise
        except GeneratorExit:
            flow.close()
            raise
        return flow.result().get()

    async def abandon(self, flow: Coroutine[Any, Any, Any]) -> None:
        """Run `flow` for a caller that has been cancelled already."""
        await self._abandon(_Flow(flow, frozenset(self._abandoned)))

    async def _abandon(self, flow: _Flow) -> None:
        self._abandoned.add(flow)
        flow.add_done_callback(self._abandoned.discard)
        flow.add_done_callback(_log_failure)
        await asyncio.wait({flow}, timeout=CANCEL_TIMEOUT)

    def execution(self, *args: Any, **more: Any) -> AsyncExecution:
        """What the code that runs sees of its execution."""
        return AsyncExecution(*args, **more, drive=self.drive_step)

    def start_renewal(self, lease: Lease[AsyncRecordStore]) -> None:
        """Leave `lease` to the loop's heartbeat."""
        self._heartbeat = asyncio_heartbeat()
        self._heartbeat.start_renewal(lease)

    def stop_renewal(self, lease: Lease[AsyncRecordStore]) -> None:
        """Take it back."""
        if self._heartbeat is not None:
            self._heartbeat.stop_renewal(lease)

    async def execute(self, command: Command) -> Reply:
        """The store's answer."""
        return await _answer(lambda: self.store.execute(command))

    #: No soft time limit strikes between two awaits.
    ask = execute

    async def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The store's answers."""
        return await _answer(lambda: self.store.execute_all(many))

    async def sleep(self, seconds: float) -> None:
        """Let others run."""
        await asyncio.sleep(seconds)

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Let others run meanwhile; raises CancelledError where the caller is cancelled."""
        cancelled = _this_flow().outcome
        if not cancelled.done():
            change = asyncio.ensure_future(self.store.wait_for_change(key, seen, seconds))
            await _first_of(change, cancelled)
            if change.done():
                change.result()
                return
            change.cancel()
            await asyncio.wait({change})
        cancelled.result().get()

    async def run(self, work: Callable[[], Any], interrupt: TaskInterrupt | None = None) -> Outcome:
        """How `work` ends, which the caller runs, and what it returns if that is to be awaited."""
        flow = _this_flow()
        if not flow.outcome.done():
            flow.work.set_result((work, interrupt))
        outcome = await flow.outcome
        steps = self._abandoned - {flow}
        if steps and not flow.is_step:
            await asyncio.wait(steps)
        return outcome

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, from a thread, which nothing can stop."""
        return await asyncio.to_thread(work)

    def interrupt(self) -> TaskInterrupt:
        """Cancels the caller."""
        return TaskInterrupt()


class _Flow(asyncio.Task[Outcome]):
    """A flow under way.

    Args:
        flow: what runs.
        before: flows whose end it waits for.
        is_step: whether it is a part of another flow's work.
    """

    def __init__(
        self,
        flow: Coroutine[Any, Any, Any],
        before: frozenset[_Flow] = frozenset(),
        is_step: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(_ending(flow, before), loop=loop)
        self.is_step = is_step
        #: What the caller is to run.
        self.work: asyncio.Future[tuple[Callable[[], Any], TaskInterrupt | None]]
        self.work = loop.create_future()
        #: How that has ended; without it, that the caller has been cancelled.
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        flows = _flows.get()
        flows.add(self)
        self.add_done_callback(flows.discard)

    def cancel(self, msg: Any = None) -> bool:
        """Do nothing: a loop that ends cancels whatever runs on it, and then waits for its end."""
        return False

    def end_soon(self, error: BaseException) -> None:
        """Do no work any more, and wait for nobody: the caller has been cancelled by `error`."""
        if not self.outcome.done():
            self.outcome.set_result(Failure(error))

    def close(self) -> None:
        """End it as its caller ended, which was closed: most likely the loop is gone."""
        if self.get_loop().is_closed():
            self.get_coro().close()
        else:
            self.end_soon(CancelledError())


#: A loop refers weakly to its tasks.
_flows: PerLoop[set[_Flow]] = PerLoop(set)


def _this_flow() -> _Flow:
    flow = asyncio.current_task()
    assert isinstance(flow, _Flow)
    return flow


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _ending(flow: Coroutine[Any, Any, Any], before: frozenset[_Flow]) -> Outcome:
    try:
        if before:
            await asyncio.wait(before)
        return Result(await flow)
    except (Exception, CancelledError) as error:
        return Failure(error)


def _log_failure(flow: _Flow) -> None:
    outcome = flow.result()
    if isinstance(outcome, Failure) and not isinstance(outcome.error, CancelledError):
        logger.warning("The end of a cancelled call failed", exc_info=outcome.error)


async def _answer(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    # A loop that ends cancels redis-py's own tasks as well, once. Only its answer tells whether a
    # command was executed, and every script answers a second time as it did the first.
    try:
        return await ask()
    except CancelledError:
        return await ask()


async def _run(work: Callable[[], Any], interrupt: TaskInterrupt | None) -> Outcome:
    try:
        if interrupt is not None:
            interrupt.begin()
        value = work()
        if inspect.isawaitable(value):
            value = await value
    except GeneratorExit:
        raise  # the loop is gone: nothing can be awaited any more
    except BaseException as error:
        return Failure(error if interrupt is None else interrupt.translate(error))
    finally:
        if interrupt is not None:
            interrupt.disarm()
    return Result(value)


class TaskInterrupt:
    """Stops the task that runs the work by cancelling it; knows its own cancelling from others'."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._struck = False

    def begin(self) -> None:
        """The current task runs the work from now on.

        Raises:
            LeaseLostError: if it is to be stopped already.
        """
        if self._struck:
            raise LeaseLostError
        self._task = asyncio.current_task()

    def trigger(self) -> None:
        """Cancel it, unless the work has ended."""
        self._struck = True
        if self._task is not None:
            self._task.cancel()

    def disarm(self) -> None:
        """The work has ended; from now on nothing is cancelled."""
        self._task = None

    def translate(self, error: BaseException) -> BaseException:
        """`error`, or LeaseLostError if it is the cancellation that this has caused."""
        if not (self._struck and isinstance(error, CancelledError)):
            return error
        # Python 3.11 counts: someone else may have cancelled the task as well.
        uncancel = getattr(self._task, "uncancel", None)
        if uncancel is not None and uncancel() > 0:
            return error
        return LeaseLostError()
