"""The flow for many calls at once: one round trip begins them all, one ends them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from celery_idempotent import signals
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    LeaseLostError,
    StoreUnavailableError,
)
from celery_idempotent.executor import conflict
from celery_idempotent.executor.active_execution import STORE_AGAIN, ActiveExecution
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.executor.executor import EXECUTION_ID_BYTES, begin_command, without_store
from celery_idempotent.executor.runtime.runtime import Runtime
from celery_idempotent.executor.settle import completing, unsaved
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

#: What a call may do: run, run without protection, take what a record holds, or why none of these.
Admission = ActiveExecution | BaseExecution | Record | IdempotencyError


async def begin_many(
    calls: Sequence[ExecutorCall], runtime: Runtime, codec: PayloadCodec
) -> list[Admission]:
    """What each of `calls` may do; nobody waits for a key that is held.

    Raises:
        StoreUnavailableError: Redis cannot be asked, and the policy is ``raise``.
    """
    asks = [begin_command(call, os.urandom(EXECUTION_ID_BYTES)) for call in calls]
    standings: list[Admission] = []
    for _ in range(2):  # once more if the process stood still until the leases were over
        sent_at = monotonic()
        try:
            answers = await runtime.execute_all(asks)
        except StoreUnavailableError as error:
            return [without_store(call, runtime, b"", error) for call in calls]
        runtime.store.outage.end()
        standings = [
            _admission(call, answer, runtime, codec, sent_at)
            for call, answer in zip(calls, answers, strict=True)
        ]
        if all(one.lease.trusted for one in standings if isinstance(one, ActiveExecution)):
            break
    return standings


def _admission(
    call: ExecutorCall,
    answer: Reply | IdempotencyError,
    runtime: Runtime,
    codec: PayloadCodec,
    sent_at: float,
) -> Admission:
    if isinstance(answer, IdempotencyError):
        return answer
    if answer.case == "begun":
        return ActiveExecution(call, layout.begun(answer.raw), runtime, codec, sent_at)
    if answer.case == "corrupt":
        return layout.corrupt(str(call.key))
    try:
        record = runtime.store.record(call.key, answer.raw)
    except CorruptRecordError as error:
        return error
    if answer.case == "reused":
        return conflict.reused(record)
    return record if answer.case == "finished" else conflict.held(call, record)


async def complete_many(
    done: Sequence[tuple[ActiveExecution, Any]], runtime: Runtime
) -> list[IdempotencyError | None]:
    """Store each value; gives for each None, or why it is not stored.

    While Redis is away it is asked again and again, as long as a lease can be trusted.
    """
    outcomes = [await completing(active, value) for active, value in done]
    runs = [active for active, _ in done]
    faults: list[IdempotencyError | None] = []
    for active, answer in zip(runs, await _persist_many(runs, outcomes, runtime), strict=True):
        active.finish()
        if isinstance(answer, IdempotencyError):
            unsaved(active, answer)
            faults.append(answer)
        elif answer.case == "ok":
            active.call.own_outcome = True
            active.send(signals.completed)
            await active.steps.discard()
            faults.append(None)
        else:
            active.report_lease_lost()
            await active.discard_outcome()
            faults.append(
                LeaseLostError(f"{active.execution.key}: another execution has taken over")
            )
    return faults


async def _persist_many(
    runs: Sequence[ActiveExecution], outcomes: Sequence[Command], runtime: Runtime
) -> list[Reply | IdempotencyError]:
    answers: list[Reply | IdempotencyError] = [Reply("lost", b"", 0)] * len(runs)
    left = list(range(len(runs)))
    since = monotonic()
    while left:
        got: Sequence[Reply | IdempotencyError]
        try:
            got = await runtime.execute_all([outcomes[n] for n in left])
        except StoreUnavailableError as error:
            got = [error] * len(left)
        again = []
        for n, answer in zip(left, got, strict=True):
            if isinstance(answer, StoreUnavailableError) and runs[n].should_retry(since):
                again.append(n)
            elif not isinstance(answer, CorruptRecordError):
                answers[n] = answer
        left = again
        if left:
            await runtime.sleep(STORE_AGAIN)
    return answers


async def release_many(
    runs: Sequence[ActiveExecution], runtime: Runtime, why: IdempotencyError
) -> None:
    """Give all keys back; one that cannot be is free when its lease ends."""
    for active in runs:
        # First, so that the heartbeat does not find the key free and take it for a loss.
        active.finish()
    try:
        answers = await runtime.execute_all([active.releasing() for active in runs])
    except StoreUnavailableError as trouble:
        logger.warning("%d keys are not given back: %s; their leases end", len(runs), trouble)
        return
    for active, answer in zip(runs, answers, strict=True):
        if isinstance(answer, IdempotencyError):
            logger.warning("%s is not given back: %s", active.execution.key, answer)
        elif answer.case == "ok":
            active.send(signals.released, error=why, reserved_seconds=None)
        else:
            active.report_lease_lost()
