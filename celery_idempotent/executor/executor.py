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
from celery_idempotent.executor.active_execution import Running
from celery_idempotent.executor.call import Caller
from celery_idempotent.executor.execution import AnyExecution
from celery_idempotent.executor.outcome import Outcome
from celery_idempotent.executor.replay import replay
from celery_idempotent.executor.runtime.blocking import Threads
from celery_idempotent.executor.runtime.run_sync import at_once
from celery_idempotent.executor.runtime.runtime import World
from celery_idempotent.executor.settle import settle
from celery_idempotent.executor.soft_limit import Interrupted
from celery_idempotent.key.key import Key
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import Payloads
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store import commands
from celery_idempotent.store.commands import Command
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

OWNER_BYTES = 16
#: Unanswered passes that a message remembers; each is a begin that timed out.
PRIOR_PASSES = 8

#: Seconds after which ``on_conflict="wait"`` looks again, though it has heard of no change: at the
#: end of a lease, but neither sooner nor later than this.
SHORTEST_STRETCH, LONGEST_STRETCH = 0.01, 1.0

_STORE_ERROR_SAYS = {
    "retry": "come back later",
    "run": "run without protection",
    "raise": "fail",
}
#: How loudly, after the first one: the worker itself tells at INFO that a task came and went.
_STORE_STILL_AWAY = {"retry": logging.INFO, "run": logging.WARNING, "raise": logging.INFO}


class Gate:
    """Lets calls through one at a time for each key; for code that blocks."""

    def __init__(self, store: RecordStore, payloads: Payloads) -> None:
        self.store = store
        self.payloads = payloads
        self.world = Threads(store)

    def enter(self, call: Caller) -> Any:
        """The call's result: its own, or the one of the execution that it duplicates.

        Raises:
            KeyReusedError: the key belongs to a call with other arguments.
            ConflictError: the key is held, and the policy is ``raise``.
            CorruptRecordError: there is something under the key that cannot be read.
            StoreUnavailableError: Redis cannot be asked, and the policy is ``raise``.
            BaseException: whatever the work raises, and whatever a stored error was.
        """
        return at_once(enter(call, self.world, self.payloads), call.soft_limit).get()

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
        if self.payloads.offloads:
            with contextlib.suppress(CorruptRecordError):
                record = self.store.look_up(key)
        case = self.store.execute(commands.forget(key, shown)).case
        if record is not None and case == "ok":
            self.payloads.discard(record)
        return case


async def enter(call: Caller, world: World, payloads: Payloads) -> Outcome:
    """How `call` ends; raises what :meth:`Gate.enter` does but for the work's own errors."""
    admission = Admission(call, world, payloads)
    try:
        standing = await begin(admission)
        if isinstance(standing, Running):
            outcome = await world.run(standing.work, standing.interrupt)
            return await settle(standing, outcome)
        if isinstance(standing, AnyExecution):
            unprotected = standing
            return await world.run(lambda: call.run(unprotected))
        return standing
    except Interrupted as stop:
        admission.unanswered = False  # if it was granted, the next pass knows it as its own
        await admission.give_back()
        logger.warning("%s: task %s comes back: %r struck", call.key, call.task_id, stop.error)
        conflict.come_back(call, _prior(call, admission.owner), stop.error)
    except GeneratorExit:
        raise  # the loop is gone: nothing can be awaited any more
    except BaseException:
        await admission.give_back()
        raise
    finally:
        admission.over()


class Admission:
    """What one call has been granted, or may have been: none of it outlives the flow."""

    def __init__(self, call: Caller, world: World, payloads: Payloads) -> None:
        self.call = call
        self.world = world
        self.payloads = payloads
        self.owner = os.urandom(OWNER_BYTES)
        #: A begin was sent, and what it was answered is not known.
        self.unanswered = False
        self.running: Running | None = None

    async def ask(self) -> Reply:
        """Ask for the right to run; the answer that grants it leaves `running` behind."""
        sent_at = monotonic()
        self.unanswered = True
        try:
            answer = await self.world.ask(asking(self.call, self.owner))
        except IdempotencyError:
            self.unanswered = False
            raise
        if answer.case == "begun":
            begun = layout.begun(answer.raw)
            self.running = Running(self.call, begun, self.world, self.payloads, sent_at)
        self.unanswered = False
        self.world.store.outage.over()
        if signals.answered.receivers:
            _tell_answer(self.call, answer, monotonic() - sent_at)
        return answer

    async def give_back(self) -> None:
        """Free the key, if it is held and the flow has left it so: a signal's handler has raised.

        Any line of the flow can be the one that does, so what it knows is not the whole.
        """
        try:
            if self.unanswered:
                await self.ask()
            running = self.running
            if running is not None and not running.settled:
                running.over()
                await running.release()
        except IdempotencyError as trouble:
            logger.warning(
                "%s: the key is not given back: %s; its lease ends by itself",
                self.call.key,
                trouble,
            )

    def over(self) -> None:
        """Nothing is left to protect."""
        if self.running is not None:
            self.running.over()


async def begin(admission: Admission) -> Running | AnyExecution | Outcome:
    """What the call may do: run, run without protection, or take what is there already."""
    call, world = admission.call, admission.world
    settings = call.settings
    since = monotonic()
    announced = 0
    while True:
        try:
            answer = await admission.ask()
        except StoreUnavailableError as error:
            return without_store(call, world, admission.owner, error)
        running = admission.running
        if running is not None:
            running.start()
            if running.execution.token != announced:
                running.announce()
            elif not running.lease.trusted:
                await admission.give_back()
                late = StoreUnavailableError("Redis answers later than idempotency_lease allows")
                return without_store(call, world, admission.owner, late)
            if running.lease.trusted:
                return running
            # The process stood still meanwhile. Asked by the same id Redis tells who has the key.
            logger.warning("%s: the lease ended before task %s ran", call.key, call.task_id)
            announced, admission.running = running.execution.token, None
            running.over()
            continue
        if answer.case == "corrupt":
            raise layout.corrupt(str(call.key))
        record = world.store.record(call.key, answer.raw)
        if answer.case == "finished":
            try:
                return await replay(call, record, world, admission.payloads)
            except NotReadyError:
                conflict.refuse(call, record)
            except StoreUnavailableError as error:
                _without_depot(call, error)
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
        await world.until_changed(call.key, answer.raw, min(left, _stretch(record, answer.now_ms)))


def _stretch(record: Record, now_ms: int) -> float:
    """Seconds that a held record may stay as it is: its lease may end without a word."""
    if record.deadline is None:
        return LONGEST_STRETCH
    lasts = record.deadline.timestamp() - now_ms / 1000
    return min(max(lasts, SHORTEST_STRETCH), LONGEST_STRETCH)


def asking(call: Caller, owner: bytes) -> Command:
    """The command that asks for the right to run."""
    settings = call.settings
    return commands.begin(
        call.key,
        owner=owner,
        prior=call.prior,
        task_id=call.task_id,
        generation=call.generation,
        worker=call.worker,
        lease_ms=settings.lease_ms,
        retention_ms=settings.result_ms,
        max_attempts=settings.max_attempts,
        error_ms=settings.error_ms,
    )


def _without_depot(call: Caller, error: StoreUnavailableError) -> NoReturn:
    """There is an outcome, so running is out of the question whatever the policy."""
    logger.error("%s: task %s is not answered: %s", call.key, call.task_id, error)
    if call.settings.on_store_error == "raise":
        raise error
    conflict.come_back(call, call.prior, error)


def _tell_answer(call: Caller, answer: Reply, seconds: float) -> None:
    signals.send(
        signals.answered,
        call.sender,
        task_id=call.task_id,
        key=str(call.key),
        case=answer.case,
        seconds=seconds,
    )


def without_store(
    call: Caller, world: World, owner: bytes, error: StoreUnavailableError
) -> AnyExecution:
    """The execution that nothing protects, if that is the policy; else there is none."""
    settings = call.settings
    policy = settings.on_store_error
    logger.log(
        logging.ERROR if world.store.outage.another_call() else _STORE_STILL_AWAY[policy],
        "%s: %s; task %s will %s",
        call.key,
        error,
        call.task_id,
        _STORE_ERROR_SAYS[policy],
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
        return world.execution(str(call.key), token=0, attempt=1)
    if policy == "raise":
        raise error
    delay = conflict.return_delay(call.returns, settings.breaker_pause)
    call.come_back(delay, _prior(call, owner), error)


def _prior(call: Caller, owner: bytes) -> bytes:
    """Redis may have granted a begin whose answer was lost: the next pass must know it again."""
    return (call.prior + owner)[-PRIOR_PASSES * OWNER_BYTES :]
