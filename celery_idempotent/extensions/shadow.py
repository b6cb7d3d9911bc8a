"""Shadow mode: every call runs, and the decision that would apply without shadow is counted.

The same scripts decide, under the same keys with another prefix. The call that begins first holds
the lease and completes the record; the others run without a lease. Errors of shadow mode never
reach the call: if Redis does not reply in time, the call runs and counts as ``unprotected``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from logging import DEBUG, ERROR, INFO
from typing import Any

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report, report_refused
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.call import Call, begin_command, release_command
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.values import (
    Answer,
    Complete,
    Delegate,
    Fail,
    Outcome,
    Release,
)
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.payload.codec import NOT_STORED, RESULT_IGNORED
from celery_idempotent.core.record import Payload, Record, State, layout
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command, LeaseExtension
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.task.message import message_headers
from celery_idempotent.core.task.message.message_headers import DEDUPLICATED
from celery_idempotent.errors import (
    IdempotencyError,
    PoisonedTaskError,
    SettingsError,
    StoreUnavailableError,
)
from celery_idempotent.settings import MARKS, Settings

UNCOUNTED_OUTAGE = Event(ERROR, "runs; shadow counting failed: {error}", decision="unprotected")
UNCOUNTED = Event(DEBUG, "runs; shadow counting failed: {error}", decision="unprotected")
END_UNCOUNTED_ERROR = Event(ERROR, "has ended; shadow could not store its end: {error}")
END_UNCOUNTED = Event(INFO, "has ended; shadow could not store its end: {error}")

#: Ends the prefix of shadow records, which are separate from the real ones.
SHADOW_SUFFIX = "-shadow"
#: Maximum seconds for a command of a call in shadow.
SHADOW_TIMEOUT = 0.5

#: Stored in place of a result or an error: only the fact counts.
_FACT = Payload("", NOT_STORED)


class Shadow(Extension):
    """Runs the body in place of the flow, and records only how the body begins and ends."""

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Returns settings with which records hold facts only, and nothing waits."""
        if not settings.enabled:
            return settings
        if settings.transaction:
            raise SettingsError(
                f"{where}: idempotency_shadow cannot be used with idempotency_transaction, whose "
                "body needs a connection: set idempotency_shadow = False on this task"
            )
        without: dict[str, Any] = dict.fromkeys(MARKS)
        return replace(
            settings,
            key_prefix=settings.key_prefix + SHADOW_SUFFIX,
            store_result=False,
            redis_timeout=min(settings.redis_timeout, SHADOW_TIMEOUT),
            wait_replicas=0,
            **without,
        )

    @classmethod
    def summary(cls, settings: Settings) -> str:
        """Returns what happens to the calls."""
        return "in shadow (every call runs)"

    @classmethod
    def explain(cls, sentence: str, settings: Settings) -> str:
        """Returns that the call runs."""
        return f"runs in shadow; otherwise: {sentence}"

    @classmethod
    def findings(cls, task: Any) -> Iterator[Sequence[str]]:
        """Yields that the task is unprotected."""
        yield (
            *("shadow", "warning", "idempotency_shadow is on", "idempotency_shadow = False"),
            "every duplicate runs, and is only counted",
        )

    async def before_begin(self) -> Answer:
        """Returns the outcome of the body, regardless of the record."""
        call, runtime = self.call, self.call.runtime
        call.replaces = 0
        host: Any = call.host
        request = host.request
        request.idempotency_without_body = False
        lease: Lease | None = None
        if message_headers.finding_of(call.task_id, request.headers) == DEDUPLICATED:
            report(table.WOULD_DEDUPLICATE, call)
        else:
            lease = await _begin(call)
        try:
            outcome = await runtime.run(partial(call.host.run, runtime.execution(str(call.key))))
        finally:
            if lease is not None:
                runtime.stop_renewal(lease)
        await _end(call, lease, outcome)
        return Answer(outcome)


async def _begin(call: Call) -> Lease | None:
    """Counts the decision about the call. Returns its lease if it holds the key."""
    store = call.runtime.store
    try:
        sent_at = lease_now()
        reply = await _decide(call)
        store.node_of(call.key).outage.end()
        settings = call.settings
        begun = layout.begun(reply.raw) if reply.case == "begun" else None
        if begun is not None and not settings.may_run(begun.attempt):
            poison = commands.poison(call.key, begun.token, settings.error_ms)
            await call.runtime.execute(poison)
            reply, begun = await _decide(call), None
        if begun is not None:
            granted = LeaseExtension(call.key, begun.token, settings.lease_ms, settings.result_ms)
            # If it is lost, the execution that has taken over completes the record.
            lease = Lease(store, granted, sent_at, lambda _: None)
            call.runtime.start_renewal(lease)
            report(table.WOULD_RUN if begun.attempt == 1 else table.WOULD_TAKE_OVER, call)
            return lease
        if reply.case == "corrupt":
            raise layout.corrupt(str(call.key))
        _count_duplicate(call, reply.case, store.record(call.key, reply.raw))
    except StoreUnavailableError as error:
        logged = store.node_of(call.key).outage.count_failure() is not None
        report(UNCOUNTED_OUTAGE if logged else UNCOUNTED, call, error=error)
        report(table.BEGIN_FAILED, call, error=error, policy="shadow")
    except IdempotencyError as error:
        report_refused(call, error, table.WOULD_REFUSE)
    except Exception as error:
        report(UNCOUNTED_OUTAGE, call, error=error)
    return None


async def _decide(call: Call) -> Reply:
    """Returns the reply to the begin of `call`."""
    reply = await call.runtime.execute(begin_command(call))
    if reply.case == "reused" and call.data.generation:
        record = call.runtime.store.record(call.key, reply.raw)
        if record.task_id == call.task_id:
            # A task that replaced itself has other arguments under the same key.
            call.accept_other_arguments()
            return await _decide(call)
    return reply


def _count_duplicate(call: Call, case: str, record: Record) -> None:
    """Counts a call that would not have run."""
    if case == "reused":
        report_refused(call, conflict.reused(record, call.host.difference), table.WOULD_REFUSE)
    elif case not in ("finished", "send"):
        policy = conflict.policy_for(call, record, puts_back=case == "wait")
        is_copy = record.task_id == call.task_id
        if call.settings.runs_again and not is_copy and conflict.POLICIES[policy].waits:
            report(table.WOULD_WAIT, call, record=record)
            return
        report(table.WOULD_CONFLICT, call, record=record, policy=policy)
    elif record.state is State.FAILED and isinstance(error := record.result, PoisonedTaskError):
        report_refused(call, error, table.WOULD_REFUSE)
    else:
        report(table.WOULD_REPLAY, call, record=record)


async def _end(call: Call, lease: Lease | None, outcome: Outcome) -> None:
    """Records that the execution has ended, if it holds the key. Does not retry."""
    if lease is None:
        return
    try:
        await call.runtime.store.node_of(call.key).breaker.check()
        await call.runtime.execute(_end_command(call, lease.token, outcome))
    except StoreUnavailableError as error:
        report(END_UNCOUNTED, call, error=error)
    except Exception as error:
        report(END_UNCOUNTED_ERROR, call, error=error)


def _end_command(call: Call, token: int, outcome: Outcome) -> Command:
    """Returns the command that ends the execution as the flow would."""
    settings = call.settings
    settlement = call.host.meaning(outcome)
    if isinstance(settlement, Complete):
        return commands.complete(call.key, token, _FACT, settings.result_ms)
    if isinstance(settlement, Fail):
        return commands.fail(call.key, token, _FACT, settings.error_ms)
    if isinstance(settlement, Delegate):
        result = Payload(RESULT_IGNORED, layout.write_task_id(call.task_id))
        return commands.delegate(call.key, token, result, settlement.awaited, settings.result_ms)
    assert isinstance(settlement, Release)
    return release_command(call, token, settlement)
