"""Direct calls, which are not messages: what functions, blocks and batches have in common.

The caller waits for the outcome. A decorated function is the body of its flow. A block or a batch
is code of the caller, so its flow runs in two parts: up to the body and, when that has ended, to
the end.
"""

from __future__ import annotations

import os
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any
from uuid import uuid4

from celery import Celery

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.flow import execute_from_body, execute_to_body
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.thread import run_flow
from celery_idempotent.core.flow.values import (
    Answer,
    Complete,
    End,
    Fail,
    Failure,
    Outcome,
    PutBack,
    Release,
    Settlement,
    that_has_run,
)
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, Tail
from celery_idempotent.core.task.receive.host import worker_name
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.functions.aio import AsyncioRuntime
from celery_idempotent.settings import Settings

#: The execution of the function or block that is running in this context: `Idempotency.current`.
current_execution: ContextVar[BaseExecution | None] = ContextVar(
    "idempotent_execution", default=None
)


class Decision(str, Enum):
    """What the caller should do about one key."""

    #: The caller holds the lease: run, then complete.
    RUN = "RUN"
    #: The key has an outcome: use it.
    REPLAY = "REPLAY"
    #: Another execution holds the key.
    CONFLICT = "CONFLICT"
    #: The same key appears earlier in the batch.
    DUPLICATE = "DUPLICATE"
    #: The key is invalid, was used with other arguments or is poisoned, or its record cannot be
    #: read or reached; see the error.
    REJECTED = "REJECTED"

    def __str__(self) -> str:
        return self.value


class Unprotected(Extension):
    """Runs a body without a record: ``enabled=False``."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        #: The contexts that options give the body, such as a transaction, while they are open.
        self._contexts = ExitStack()

    async def before_begin(self) -> None:
        """Grants the call, and enters the contexts that its options give the body."""
        settings, execution = self.call.settings, self.call.run_unprotected().execution
        for extension in settings.extensions:
            self._contexts.enter_context(extension.unprotected(settings, execution))

    def ran_unprotected(self, outcome: Outcome) -> Outcome:
        """Leaves the contexts with the error of the body, if any."""
        try:
            with self._contexts:
                outcome.get()
        except BaseException as error:
            return Failure(error)
        return outcome

    def ended(self) -> None:
        """Leaves the contexts of a block that has ended without completing, with an error."""
        with suppress(NotCompletedError), self._contexts:
            raise NotCompletedError


def extensions_of_direct_call(settings: Settings) -> tuple[type[Extension], ...]:
    """Returns the extensions that the options of a direct call add to its flow."""
    return settings.extensions if settings.enabled else (Unprotected,)


class NotCompletedError(Exception):
    """A block or a batch ended without completing the key; only signals carry this error."""


def run_as_current(execution: BaseExecution, work: Callable[[], Any]) -> Any:
    """Runs `work` with `execution` as the current one."""
    previous = current_execution.set(execution)
    try:
        return _that_has_run(execution, work())
    finally:
        current_execution.reset(previous)


async def await_as_current(execution: BaseExecution, work: Callable[[], Any]) -> Any:
    """Awaits `work` with `execution` as the current one."""
    previous = current_execution.set(execution)
    try:
        return _that_has_run(execution, await work())
    finally:
        current_execution.reset(previous)


def _that_has_run(execution: BaseExecution, value: Any) -> Any:
    """Returns `value`, unless it shows that the function has not run: see `values.that_has_run`."""
    advice = "decorate the coroutine function itself, await it, or return a list"
    return that_has_run(value, f"{execution.key}: the function", advice)


def direct_call(
    sender: Any, key: Key, settings: Settings, label: str = "", task_id: str = ""
) -> CallData:
    """Returns the data of a call: of a function, a code block or an entry of a batch.

    Args:
        sender: the sender of the call's signals.
        label: shown beside the key.
        task_id: the id of a message, if the call handles one; by default a random id, so that no
            other call is a redelivery of this one.
    """
    task_id = task_id or str(uuid4())
    return CallData(
        sender,
        key.of_message(task_id) if settings.runs_again else key,
        settings,
        task_id,
        worker_name(None, os.getpid()),
        settings.wait_timeout,
        Tail(label=label),
    )


def outcome_of(call: Call, end: End | BaseException) -> Outcome:
    """Returns the outcome of a direct call.

    A call that a task would put back fails with the reason, and its caller decides whether to call
    again.

    Args:
        end: the end of the flow, or the error that it raised.
    """
    if isinstance(end, Answer):
        return end.outcome
    if isinstance(end, BaseException):
        raise end
    assert isinstance(end, PutBack)  # the policies of direct calls neither drop nor reject
    report(table.RAISES, call, reason=end.reason)
    return Failure(end.reason)


class DirectHost:
    """The `Host` of a direct call: runs its body.

    Args:
        work: runs the function; None for a block or a batch, whose caller runs the code.
        app: publishes the messages of the body; None if unknown.
        difference: as `Host.difference`; by default unknown.
    """

    returns_restored = True

    def __init__(
        self,
        data: CallData,
        work: Callable[[], Any] | None = None,
        app: Celery | None = None,
        difference: Callable[[bytes], str] = lambda _: "",
    ) -> None:
        self.data = data
        self.difference = difference
        self._work: Any = work
        self.app = app

    def run(self, execution: BaseExecution) -> Any:
        """Runs the work with `execution` as the current one."""
        return run_as_current(execution, self._work)

    def meaning(self, outcome: Outcome) -> Settlement:
        """Returns Fail for an error that duplicates get, Release for any other, else Complete."""
        if not isinstance(outcome, Failure):
            return Complete(outcome)
        replayed = self.data.settings.replays(outcome.error)
        if replayed and not isinstance(outcome.error, NotCompletedError):
            return Fail(outcome)
        return Release(outcome)

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Raises `error`: the record is the only source of the result."""
        raise error


class AsyncDirectHost(DirectHost):
    """Runs the body of a call of a coroutine function."""

    async def run(self, execution: BaseExecution) -> Any:
        """Awaits the work with `execution` as the current one."""
        return await await_as_current(execution, self._work)


#: For each call, the part of its flow up to the body (`flow.execute_to_body`), or from it to the
#: end.
Parts = Mapping[Call, Coroutine[Any, Any, End | None]]


class TwoPartFlows:
    """Runs flows up to their bodies, and later from there to their ends: base of blocks, batches.

    The methods of this class and its subclasses are coroutines. With a blocking runtime they never
    suspend, so :func:`.run_sync` can call them like functions.
    """

    #: The calls whose flows have run up to their bodies, or ended; `_begin` sets it.
    _begun_calls: Sequence[Call] = ()

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        #: How each flow has ended, or the error that it raised; None while it is at its body.
        self._ends: dict[Call, End | BaseException | None] = {}

    def __del__(self) -> None:
        self._close()  # the caller has never ended the block or batch

    def _after_begin(self) -> None:
        """Called by `_begin` when all flows have reached their bodies or ended."""
        raise NotImplementedError

    async def _begin(self, calls: Sequence[Call], reason: BaseException | None = None) -> None:
        """Begins `calls`; after an error or a cancellation, ends those that have begun.

        Args:
            reason: as for `_end`; by default the raised error.
        """
        self._begun_calls = calls
        try:
            await self._drive(lambda: self._run({call: execute_to_body(call) for call in calls}))
            self._after_begin()
        except BaseException as error:
            await self._end(error, reason or error)
            raise

    async def _complete(self, outcomes: Mapping[Call, Outcome]) -> None:
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

    async def _settle(self, outcomes: Mapping[Call, Outcome]) -> None:
        """Runs the flows to their ends, except those that are not at their bodies."""
        at_body = {call: outcome for call, outcome in outcomes.items() if call.at_body}
        await self._run({call: execute_from_body(call, at_body[call]) for call in at_body})

    async def _run(self, parts: Parts) -> None:
        """Runs these parts one after the other, and notes how they end."""
        for call, part in parts.items():
            self._ends[call] = await part

    async def _drive(self, start: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if isinstance(self._runtime, AsyncioRuntime):
            await self._runtime.drive(start())
        else:
            run_flow(start)
