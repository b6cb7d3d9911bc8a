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
from celery_idempotent.executor.active_execution import STORE_AGAIN, Running
from celery_idempotent.executor.call import Caller
from celery_idempotent.executor.execution import AnyExecution
from celery_idempotent.executor.executor import OWNER_BYTES, asking, without_store
from celery_idempotent.executor.runtime.runtime import World
from celery_idempotent.executor.settle import completing, unsaved
from celery_idempotent.lease.clock import monotonic
from celery_idempotent.payload.codec import Payloads
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store.commands import Command
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

#: What a call may do: run, run without protection, take what a record holds, or why none of these.
Standing = Running | AnyExecution | Record | IdempotencyError


async def begin_many(calls: Sequence[Caller], world: World, payloads: Payloads) -> list[Standing]:
    """What each of `calls` may do; nobody waits for a key that is held.

    Raises:
        StoreUnavailableError: Redis cannot be asked, and the policy is ``raise``.
    """
    asks = [asking(call, os.urandom(OWNER_BYTES)) for call in calls]
    standings: list[Standing] = []
    for _ in range(2):  # once more if the process stood still until the leases were over
        sent_at = monotonic()
        try:
            answers = await world.execute_all(asks)
        except StoreUnavailableError as error:
            return [without_store(call, world, b"", error) for call in calls]
        world.store.outage.over()
        standings = [
            _standing(call, answer, world, payloads, sent_at)
            for call, answer in zip(calls, answers, strict=True)
        ]
        if all(one.lease.trusted for one in standings if isinstance(one, Running)):
            break
    return standings


def _standing(
    call: Caller, answer: Reply | IdempotencyError, world: World, payloads: Payloads, sent_at: float
) -> Standing:
    if isinstance(answer, IdempotencyError):
        return answer
    if answer.case == "begun":
        return Running(call, layout.begun(answer.raw), world, payloads, sent_at)
    if answer.case == "corrupt":
        return layout.corrupt(str(call.key))
    try:
        record = world.store.record(call.key, answer.raw)
    except CorruptRecordError as error:
        return error
    if answer.case == "reused":
        return conflict.reused(record)
    return record if answer.case == "finished" else conflict.held(call, record)


async def complete_many(
    done: Sequence[tuple[Running, Any]], world: World
) -> list[IdempotencyError | None]:
    """Store each value; gives for each None, or why it is not stored.

    While Redis is away it is asked again and again, as long as a lease can be trusted.
    """
    outcomes = [await completing(running, value) for running, value in done]
    runs = [running for running, _ in done]
    faults: list[IdempotencyError | None] = []
    for running, answer in zip(runs, await _persist_many(runs, outcomes, world), strict=True):
        running.over()
        if isinstance(answer, IdempotencyError):
            unsaved(running, answer)
            faults.append(answer)
        elif answer.case == "ok":
            running.call.own_outcome = True
            running.send(signals.completed)
            await running.steps.discard()
            faults.append(None)
        else:
            running.tell_loss()
            await running.discard_outcome()
            faults.append(
                LeaseLostError(f"{running.execution.key}: another execution has taken over")
            )
    return faults


async def _persist_many(
    runs: Sequence[Running], outcomes: Sequence[Command], world: World
) -> list[Reply | IdempotencyError]:
    answers: list[Reply | IdempotencyError] = [Reply("lost", b"", 0)] * len(runs)
    left = list(range(len(runs)))
    since = monotonic()
    while left:
        got: Sequence[Reply | IdempotencyError]
        try:
            got = await world.execute_all([outcomes[n] for n in left])
        except StoreUnavailableError as error:
            got = [error] * len(left)
        again = []
        for n, answer in zip(left, got, strict=True):
            if isinstance(answer, StoreUnavailableError) and runs[n].outlasts(since):
                again.append(n)
            elif not isinstance(answer, CorruptRecordError):
                answers[n] = answer
        left = again
        if left:
            await world.sleep(STORE_AGAIN)
    return answers


async def release_many(runs: Sequence[Running], world: World, why: IdempotencyError) -> None:
    """Give all keys back; one that cannot be is free when its lease ends."""
    for running in runs:
        # First, so that the heartbeat does not find the key free and take it for a loss.
        running.over()
    try:
        answers = await world.execute_all([running.releasing() for running in runs])
    except StoreUnavailableError as trouble:
        logger.warning("%d keys are not given back: %s; their leases end", len(runs), trouble)
        return
    for running, answer in zip(runs, answers, strict=True):
        if isinstance(answer, IdempotencyError):
            logger.warning("%s is not given back: %s", running.execution.key, answer)
        elif answer.case == "ok":
            running.send(signals.released, error=why, held_for=None)
        else:
            running.tell_loss()
