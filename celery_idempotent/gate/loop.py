"""The world of code on an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from celery_idempotent.errors import IdempotencyError, LeaseLostError
from celery_idempotent.gate.execution import AsyncExecution
from celery_idempotent.gate.outcome import Failure, Outcome, Result
from celery_idempotent.key.key import Key
from celery_idempotent.lease.held import Lease
from celery_idempotent.lease.loop_heartbeat import loop_heartbeat
from celery_idempotent.store.async_records import AsyncRecordStore
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

T = TypeVar("T")


class Loop:
    """Everything is awaited; one for each flow.

    A flow that is cancelled goes on to its end, without the work: a begin may have been granted,
    and then the key is to be given back; an outcome that is being stored must be stored. A command
    that is cancelled on its way is sent again, since only its answer tells whether it was executed,
    and every script answers a second time as it did the first. The cancellation is raised when the
    flow has ended (:meth:`end`).
    """

    execution = AsyncExecution

    def __init__(self, store: AsyncRecordStore) -> None:
        self.store = store
        self._cancelled: asyncio.CancelledError | None = None
        self._holds = False
        # How often the task has been cancelled; Python 3.10 does not count.
        self._cancellings = getattr(asyncio.current_task(), "cancelling", lambda: 0)
        self._cancellings_before = self._cancellings()

    def hold(self, lease: Lease[AsyncRecordStore]) -> None:
        """Leave `lease` to the loop's heartbeat."""
        self._holds = True
        loop_heartbeat().hold(lease)

    def let_go(self, lease: Lease[AsyncRecordStore]) -> None:
        """Take it back."""
        self._holds = False
        loop_heartbeat().let_go(lease)

    async def execute(self, command: Command) -> Reply:
        """The store's answer, which comes even if the flow is cancelled meanwhile."""
        return await self._answer(lambda: self.store.execute(command))

    #: No soft time limit strikes between two awaits.
    ask = execute

    async def execute_all(self, many: Sequence[Command]) -> list[Reply | IdempotencyError]:
        """The store's answers, which come even if the flow is cancelled meanwhile."""
        return await self._answer(lambda: self.store.execute_all(many))

    async def _answer(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        while True:
            try:
                answer = await ask()
            except asyncio.CancelledError as error:
                self._cancelled = error
            else:
                if self._cancelled is None and self._cancellings() > self._cancellings_before:
                    # Before Python 3.12 `asyncio.wait_for`, in redis-py, loses one now and then.
                    self._cancelled = asyncio.CancelledError()
                return answer

    async def sleep(self, seconds: float) -> None:
        """Let others run; raises the cancellation while there is nothing to be given back."""
        await self._pass_time(lambda: asyncio.sleep(seconds))

    async def until_changed(self, key: Key, seen: bytes, seconds: float) -> None:
        """Let others run meanwhile; raises as `sleep` does."""
        await self._pass_time(lambda: self.store.until_changed(key, seen, seconds))

    async def _pass_time(self, wait: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            if not self._holds:
                self.end()
            await wait()
        except asyncio.CancelledError as error:
            self._cancelled = error
            if not self._holds:
                raise

    async def run(self, work: Callable[[], Any], interrupt: TaskInterrupt | None = None) -> Outcome:
        """How `work` ends, and what it returns if that is to be awaited."""
        if self._cancelled is not None:
            return Failure(self._cancelled)
        try:
            value = work()
            if inspect.isawaitable(value):
                value = await value
        except GeneratorExit:
            raise  # the loop is gone: nothing can be awaited any more
        except BaseException as error:
            return Failure(error if interrupt is None else interrupt.meant(error))
        finally:
            if interrupt is not None:
                interrupt.over()
        return Result(value)

    async def apart(self, work: Callable[[], T]) -> T:
        """What `work` returns, from a thread, which nothing can stop."""
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        while True:
            try:
                return await asyncio.shield(thread)
            except asyncio.CancelledError as error:
                if thread.cancelled():
                    raise
                self._cancelled = error

    def interrupt(self) -> TaskInterrupt:
        """Cancels the running task."""
        return TaskInterrupt()

    def end(self) -> None:
        """Raise the cancellation that has come meanwhile, if one has."""
        if self._cancelled is not None:
            raise self._cancelled

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class TaskInterrupt:
    """Stops the task that creates this by cancelling it; knows its own cancelling from others'."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._struck = False
        self._over = False

    def strike(self) -> None:
        """Cancel it, unless the protected part is over."""
        if not self._over:
            self._struck = True
            self._task.cancel()

    def over(self) -> None:
        """The protected part has ended; from now on nothing is cancelled."""
        self._over = True

    def meant(self, error: BaseException) -> BaseException:
        """`error`, or LeaseLostError if it is the cancellation that this has caused."""
        if not (self._struck and isinstance(error, asyncio.CancelledError)):
            return error
        # Python 3.11 counts: someone else may have cancelled the task as well.
        uncancel = getattr(self._task, "uncancel", None)
        if uncancel is not None and uncancel() > 0:
            return error
        return LeaseLostError()
