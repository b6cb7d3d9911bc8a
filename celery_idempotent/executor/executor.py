"""The flow: begin, then run, replay or refuse, then settle."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import Any, NoReturn

from celery_idempotent import signals
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    NotReadyError,
    StoreUnavailableError,
)
from celery_idempotent.executor import conflict
from celery_idempotent.executor.active_execution import ActiveExecution
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.outcome import Outcome
from celery_idempotent.executor.replay import replay
from celery_idempotent.executor.runtime.blocking import BlockingRuntime
from celery_idempotent.executor.runtime.run_sync import run_sync
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.settle import settle
from celery_idempotent.executor.soft_limit import Interrupted
from celery_idempotent.key.key import Key
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

EXECUTION_ID_BYTES = 16
#: Unanswered passes that a message remembers; each is a begin that timed out.
MAX_UNANSWERED_IDS = 8

#: Seconds after which ``on_conflict="wait"`` looks again, though it has heard of no change: at the
#: end of a lease, but neither sooner nor later than this.
MIN_WAIT_INTERVAL, MAX_WAIT_INTERVAL = 0.01, 1.0

_STORE_ERROR_MESSAGES = {
    "retry": "come back later",
    "run": "run without protection",
    "raise": "fail",
}
#: How loudly, after the first one: the worker itself tells at INFO that a task came and went.
_REPEATED_STORE_ERROR_LEVELS = {
    "retry": logging.INFO,
    "run": logging.WARNING,
    "raise": logging.INFO,
}


class Executor:
    """Lets calls through one at a time for each key; for code that blocks."""

    def __init__(self, store: RecordStore, codec: PayloadCodec) -> None:
        self.store = store
        self.codec = codec
        self.runtime = BlockingRuntime(store)

    def enter(self, call: ExecutorCall) -> Any:
        """The call's result: its own, or the one of the execution that it duplicates.

        Raises:
            KeyReusedError: the key belongs to a call with other arguments.
            ConflictError: the key is held, and the policy is ``raise``.
            CorruptRecordError: there is something under the key that cannot be read.
            StoreUnavailableError: Redis cannot be asked, and the policy is ``raise``.
            BaseException: whatever the work raises, and whatever a stored error was.
        """
        return run_sync(enter(call, self.runtime, self.codec), call.soft_limit).get()

    def forget(self, key: Key, shown: Record | str | None = None) -> str:
        """Drop the record of `key`, and what it has in the depot.

        Args:
            shown: as :func:`commands.forget` takes it.

        Returns:
            ``ok``, ``absent`` or ``changed``, as lua/forget.lua has them.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
        """
        record = None
        if self.codec.offloads:
            with contextlib.suppress(CorruptRecordError):
                record = self.store.get(key)
        case = self.store.execute(commands.forget(key, shown)).case
        if record is not None and case == "ok":
            self.codec.discard(record)
        return case


async def enter(call: ExecutorCall, runtime: Runtime, codec: PayloadCodec) -> Outcome:
    """How `call` ends; raises what :meth:`Gate.enter` does but for the work's own errors."""
    begin_request = BeginRequest(call, runtime, codec)
    try:
        admission = await begin(begin_request)
        if isinstance(admission, ActiveExecution):
            outcome = await runtime.run(admission.work, admission.interrupt)
            return await settle(admission, outcome)
        if isinstance(admission, BaseExecution):
            unprotected = admission
            return await runtime.run(lambda: call.run(unprotected))
        return admission
    except Interrupted as stop:
        begin_request.unanswered = False  # if it was granted, the next pass knows it as its own
        await begin_request.give_back()
        logger.warning("%s: task %s comes back: %r struck", call.key, call.task_id, stop.error)
        conflict.requeue(call, _unanswered_ids(call, begin_request.execution_id), stop.error)
    except GeneratorExit:
        raise  # the loop is gone: nothing can be awaited any more
    except BaseException:
        await begin_request.give_back()
        raise
    finally:
        begin_request.finish()


class BeginRequest:
    """What one call has been granted, or may have been: none of it outlives the flow."""

    def __init__(self, call: ExecutorCall, runtime: Runtime, codec: PayloadCodec) -> None:
        self.call = call
        self.runtime = runtime
        self.codec = codec
        self.execution_id = os.urandom(EXECUTION_ID_BYTES)
        #: A begin was sent, and what it was answered is not known.
        self.unanswered = False
        self.active: ActiveExecution | None = None

    async def ask(self) -> Reply:
        """Ask for the right to run; the answer that grants it leaves `running` behind."""
        sent_at = monotonic()
        self.unanswered = True
        try:
            answer = await self.runtime.ask(begin_command(self.call, self.execution_id))
        except IdempotencyError:
            self.unanswered = False
            raise
        if answer.case == "begun":
            begun = layout.begun(answer.raw)
            self.active = ActiveExecution(self.call, begun, self.runtime, self.codec, sent_at)
        self.unanswered = False
        self.runtime.store.outage.end()
        if signals.begin_replied.receivers:
            _send_begin_replied(self.call, answer, monotonic() - sent_at)
        return answer

    async def give_back(self) -> None:
        """Free the key, if it is held and the flow has left it so: a signal's handler has raised.

        Any line of the flow can be the one that does, so what it knows is not the whole.
        """
        try:
            if self.unanswered:
                await self.ask()
            active = self.active
            if active is not None and not active.settled:
                active.finish()
                await active.release()
        except IdempotencyError as trouble:
            logger.warning(
                "%s: the key is not given back: %s; its lease ends by itself",
                self.call.key,
                trouble,
            )

    def finish(self) -> None:
        """Nothing is left to protect."""
        if self.active is not None:
            self.active.finish()


async def begin(begin_request: BeginRequest) -> ActiveExecution | BaseExecution | Outcome:
    """What the call may do: run, run without protection, or take what is there already."""
    call, runtime = begin_request.call, begin_request.runtime
    settings = call.settings
    since = monotonic()
    announced = 0
    while True:
        try:
            answer = await begin_request.ask()
        except StoreUnavailableError as error:
            return without_store(call, runtime, begin_request.execution_id, error)
        active = begin_request.active
        if active is not None:
            active.start()
            if active.execution.token != announced:
                active.announce()
            elif not active.lease.trusted:
                await begin_request.give_back()
                late = StoreUnavailableError("Redis answers later than idempotency_lease allows")
                return without_store(call, runtime, begin_request.execution_id, late)
            if active.lease.trusted:
                return active
            # The process stood still meanwhile. Asked by the same id Redis tells who has the key.
            logger.warning("%s: the lease ended before task %s ran", call.key, call.task_id)
            announced, begin_request.active = active.execution.token, None
            active.finish()
            continue
        if answer.case == "corrupt":
            raise layout.corrupt(str(call.key))
        record = runtime.store.record(call.key, answer.raw)
        if answer.case == "finished":
            try:
                return await replay(call, record, runtime, begin_request.codec)
            except NotReadyError:
                conflict.refuse(call, record)
            except StoreUnavailableError as error:
                _without_offload(call, error)
        if answer.case == "reused" and call.generation and record.task_id == call.task_id:
            # What the very call has become by a replacement is not another one with its key.
            call.key = replace(call.key, fingerprint=b"")
            continue
        if answer.case == "reused":
            refusal = conflict.reused(record)
            logger.warning("Task %s is refused: %s", call.task_id, refusal)
            raise refusal
        waits = settings.on_conflict == "wait"
        left = since + call.wait_timeout - monotonic() if waits else 0.0
        if left <= 0:
            conflict.refuse(call, record)
        await runtime.wait_for_change(
            call.key, answer.raw, min(left, _wait_interval(record, answer.now_ms))
        )


def _wait_interval(record: Record, now_ms: int) -> float:
    """Seconds that a held record may stay as it is: its lease may end without a word."""
    if record.deadline is None:
        return MAX_WAIT_INTERVAL
    lasts = record.deadline.timestamp() - now_ms / 1000
    return min(max(lasts, MIN_WAIT_INTERVAL), MAX_WAIT_INTERVAL)


def begin_command(call: ExecutorCall, execution_id: bytes) -> Command:
    """The command that asks for the right to run."""
    settings = call.settings
    return commands.begin(
        call.key,
        execution_id=execution_id,
        unanswered_ids=call.unanswered_ids,
        task_id=call.task_id,
        generation=call.generation,
        worker=call.worker,
        lease_ms=settings.lease_ms,
        retention_ms=settings.result_ms,
        max_attempts=settings.max_attempts,
        error_ms=settings.error_ms,
    )


def _without_offload(call: ExecutorCall, error: StoreUnavailableError) -> NoReturn:
    """There is an outcome, so running is out of the question whatever the policy."""
    logger.error("%s: task %s is not answered: %s", call.key, call.task_id, error)
    if call.settings.on_store_error == "raise":
        raise error
    conflict.requeue(call, call.unanswered_ids, error)


def _send_begin_replied(call: ExecutorCall, answer: Reply, seconds: float) -> None:
    signals.send(
        signals.begin_replied,
        call.sender,
        task_id=call.task_id,
        key=str(call.key),
        case=answer.case,
        seconds=seconds,
    )


def without_store(
    call: ExecutorCall, runtime: Runtime, execution_id: bytes, error: StoreUnavailableError
) -> BaseExecution:
    """The execution that nothing protects, if that is the policy; else there is none."""
    settings = call.settings
    policy = settings.on_store_error
    logger.log(
        logging.ERROR
        if runtime.store.outage.another_call()
        else _REPEATED_STORE_ERROR_LEVELS[policy],
        "%s: %s; task %s will %s",
        call.key,
        error,
        call.task_id,
        _STORE_ERROR_MESSAGES[policy],
    )
    signals.send(
        signals.store_unavailable,
        call.sender,
        task_id=call.task_id,
        key=str(call.key),
        error=error,
        policy=policy,
    )
    if policy == "run":
        return runtime.execution(str(call.key), token=0, attempt=1)
    if policy == "raise":
        raise error
    delay = conflict.requeue_delay(call.requeue_count, settings.breaker_max_delay)
    call.requeue(delay, _unanswered_ids(call, execution_id), error)


def _unanswered_ids(call: ExecutorCall, execution_id: bytes) -> bytes:
    """Redis may have granted a begin whose answer was lost: the next pass must know it again."""
    return (call.unanswered_ids + execution_id)[-MAX_UNANSWERED_IDS * EXECUTION_ID_BYTES :]
