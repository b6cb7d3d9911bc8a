"""Runs flows on an event loop; `core.flow.thread` is the counterpart for blocking code."""

from __future__ import annotations

import asyncio
import inspect
import logging
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from celery_idempotent.core.flow.execution import AsyncExecution
from celery_idempotent.core.flow.values import Failure, Outcome, Result
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.store.transport.per_loop import PerLoop
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.functions.asyncio_heartbeat import asyncio_heartbeat

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that a cancelled caller waits for its key to be released, or its outcome to be stored.
CANCEL_TIMEOUT = 1.0


class AsyncioRuntime:
    """The runtime of coroutines; one instance for each call, block or batch.

    A flow runs in its own asyncio task, which is never cancelled, because a command that is
    interrupted may or may not have been executed. The task of the caller runs the body and waits
    for the flow to end. If the caller is cancelled, the flow ends as soon as it can: it releases a
    key that was granted, and finishes storing an outcome. The caller waits for that up to
    CANCEL_TIMEOUT, unless it is cancelled again.
    """

    execution = AsyncExecution

    def __init__(self, store: RecordStore) -> None:
        self.store = store
        renewer = asyncio_heartbeat().renewer(store)
        self.start_renewal, self.stop_renewal = renewer.start_renewal, renewer.stop_renewal
        #: The flows that still run although their callers were cancelled.
        self._abandoned: set[_Flow] = set()

    async def drive(self, flow: Coroutine[Any, Any, T]) -> T:
        """Runs `flow` once all abandoned flows have ended, and returns its value."""
        value: T = await self._drive(_Flow(flow, frozenset(self._abandoned)))
        return value

    async def drive_step(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs the flow of a step, without waiting for other flows, and returns its value."""
        value: T = await self._drive(_Flow(start(), is_step=True))
        return value

    async def _drive(self, flow: _Flow) -> Any:
        """Waits for the end of a flow; runs the function that it requests, if any, in this task."""
        try:
            await _wait_for_any(flow, flow.work)
            if flow.work.done():
                outcome = await _run(flow.work.result())
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
        """Runs `flow`, whose caller was cancelled."""
        await self._abandon(_Flow(flow, frozenset(self._abandoned)))

    async def _abandon(self, flow: _Flow) -> None:
        self._abandoned.add(flow)
        flow.add_done_callback(self._abandoned.discard)
        flow.add_done_callback(_log_failure)
        await asyncio.wait({flow}, timeout=CANCEL_TIMEOUT)

    async def execute(self, command: Command) -> Reply:
        """Returns the reply of the store."""
        return await _until_replied(lambda: self.store.execute(command))

    async def execute_all(self, commands: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """Returns the replies of the store."""
        return await _until_replied(lambda: self.store.execute_all(commands))

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)

    async def wait_for_change(self, key: Key, seen: bytes, seconds: float) -> None:
        """Waits for a change; raises CancelledError if the caller is cancelled."""
        cancelled = _this_flow().outcome
        if not cancelled.done():
            change = asyncio.ensure_future(self.store.wait_for_change(key, seen, seconds))
            await _wait_for_any(change, cancelled)
            if change.done():
                change.result()
                return
            change.cancel()
            await asyncio.wait({change})
        cancelled.result().get()

    async def run(self, func: Callable[[], Any]) -> Outcome:
        """Has the caller's task run `func`, and returns the outcome; the flow calls it."""
        flow = _this_flow()
        if not flow.outcome.done():
            flow.work.set_result(func)
        outcome = await flow.outcome
        steps = self._abandoned - {flow}
        if steps and not flow.is_step:
            await asyncio.wait(steps)
        return outcome


class _Flow(asyncio.Task[Outcome]):
    """An asyncio task that runs a flow.

    Args:
        flow: the coroutine.
        before: flows that must end first.
        is_step: whether the flow is a step of another flow's body.
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
        #: Gets the function that the caller is to run: the body, or that of a step.
        self.work: asyncio.Future[Callable[[], Any]] = loop.create_future()
        #: Gets the outcome of that function, or a Failure when the caller is cancelled.
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        flows = _flows.get()
        flows.add(self)
        self.add_done_callback(flows.discard)

    def cancel(self, msg: Any = None) -> bool:
        """Does nothing. ``asyncio.run`` cancels all tasks at its end, and then waits for them."""
        return False

    def end_soon(self, error: BaseException) -> None:
        """Makes the flow skip the body and stop waiting, since `error` has cancelled its caller."""
        if not self.outcome.done():
            self.outcome.set_result(Failure(error))

    def close(self) -> None:
        """Ends the flow of a caller whose coroutine was closed, usually together with its loop."""
        if self.get_loop().is_closed():
            self.get_coro().close()
        else:
            self.end_soon(CancelledError())


#: Strong references, because an event loop has only weak ones to its tasks.
_flows: PerLoop[set[_Flow]] = PerLoop(set)


def _this_flow() -> _Flow:
    flow = asyncio.current_task()
    assert isinstance(flow, _Flow)
    return flow


async def _wait_for_any(*futures: asyncio.Future[Any]) -> None:
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
        logger.warning("The flow of a cancelled call failed", exc_info=outcome.error)


async def _until_replied(send: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Awaits the reply to a command in a task of its own.

    redis-py's timeouts cancel the current task, and a flow cannot be cancelled.
    """
    task = asyncio.ensure_future(send())
    await _wait_for_any(task)
    if task.cancelled():
        # ``asyncio.run`` has cancelled it at its end, which it does once. Only a reply shows
        # whether the command was executed, and a script gives a repeated command the same reply.
        task = asyncio.ensure_future(send())
        await _wait_for_any(task)
    return task.result()


async def _run(func: Callable[[], Any]) -> Outcome:
    try:
        value = func()
        if inspect.isawaitable(value):
            value = await value
    except GeneratorExit:
        raise  # the event loop is closed: nothing can be awaited
    except BaseException as error:
        return Failure(error)
    return Result(value)


class AsyncExecutor:
    """The `Executor` of coroutines; serves any number of event loops."""

    def __init__(self, store: RecordStore, codec: PayloadCodec) -> None:
        self.store = store
        self.codec = codec.for_asyncio()
