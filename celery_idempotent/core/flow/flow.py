"""The flow: begin, then run, replay or refuse, then settle.

:func:`execute` runs all of it. For a block or a batch, whose code the caller runs,
:func:`execute_to_body` and :func:`execute_from_body` run the two parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import like_it, report, report_refused
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.call import Call, Grant
from celery_idempotent.core.flow.replay import (
    replacement_error,
    replay,
    replay_or_put_back,
)
from celery_idempotent.core.flow.values import (
    AGAIN,
    GRANTED,
    Admission,
    Answer,
    Complete,
    Delegate,
    Drop,
    End,
    Fail,
    Failure,
    Finished,
    Held,
    Outcome,
    Proceed,
    PutBack,
    Reject,
    Release,
    Result,
    Settlement,
    restored,
)
from celery_idempotent.core.payload.codec import NOT_STORED, RESULT_IGNORED, not_stored
from celery_idempotent.core.record import ERROR, RESULT, Payload, Record, State, layout
from celery_idempotent.core.record.layout import DELEGATED
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.node import MAX_DELAY
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    LeaseLostError,
    NotReadyError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from celery_idempotent.core.flow.extension import Extension

#: A function that waits begins again when the record changes, or when the lease of the other
#: execution ends, which changes no record: after at least, and at most, so many seconds.
MIN_WAIT_INTERVAL, MAX_WAIT_INTERVAL = 0.01, 1.0


async def execute(call: Call) -> End:
    """Runs `call` from its begin to its settlement, and returns how it ends.

    Raises:
        CorruptRecordError: if the record cannot be read.
        StoreUnavailableError: if Redis is unavailable, and the policy is ``raise``.
        BaseException: what a signal handler has raised outside the body.
    """
    end = await _part(call, _execute(call))
    assert end is not None
    return end


async def execute_to_body(call: Call) -> End | None:
    """Runs `call` up to its body, which the caller runs.

    Returns:
        None if the body is to run; then :func:`execute_from_body` must follow, as long as
        `call.at_body` is true. Else the end of the call.

    Raises:
        As :func:`execute`.
    """
    return await _part(call, begin(call))


async def execute_from_body(call: Call, outcome: Outcome) -> End:
    """Runs `call`, whose body has ended with `outcome`, to its settlement.

    Raises:
        As :func:`execute`.
    """
    assert call.grant is not None
    call.at_body = False
    end = await _part(call, _settle(call.grant, outcome))
    assert end is not None
    return end


async def _execute(call: Call) -> End:
    if (end := await begin(call)) is not None:
        return end
    assert call.grant is not None
    outcome = await call.runtime.run(partial(call.host.run, call.grant.execution))
    return await _settle(call.grant, outcome)


async def _settle(grant: Grant, outcome: Outcome) -> End:
    try:
        return await settle(grant, outcome)
    except GeneratorExit:
        raise  # the event loop is closed: nothing can be awaited
    except BaseException as error:
        return await settle_again(grant, outcome, error)


async def _part(call: Call, part: Coroutine[Any, Any, End | None]) -> End | None:
    """Runs a part of the flow; closes the call, unless that part ends at the body.

    After an error, it gives back the key that was granted.
    """
    try:
        end = await part
        call.at_body = end is None
        return end
    except GeneratorExit:
        raise  # the event loop is closed: nothing can be awaited
    except BaseException as error:
        await call.interrupt(error)
        raise
    finally:
        if not call.at_body:
            call.close()


async def begin(call: Call) -> End | None:
    """Requests the key; returns None if the call may run, else the end of the call."""
    extension: Extension
    for extension in call.extensions:
        if (end := await extension.before_begin()) is not None:
            return end
    if call.grant is not None:
        return None
    since = lease_now()
    while True:
        admission = await admit(call)
        for extension in call.extensions:
            admission = await extension.admitted(admission)
        if admission is GRANTED:
            assert call.grant is not None
            report(table.TAKEOVER if call.grant.execution.recovered else table.RUN, call)
            return None
        if isinstance(admission, Finished):
            return await replay_or_put_back(call, admission.record, sends=admission.sends)
        if isinstance(admission, Held):
            record, reply = admission.record, admission.reply
            # Only for the end of an execution. A reservation may be that of a message which this
            # process is to run next, and waiting here would keep it from running.
            waits = conflict.POLICIES[call.settings.on_conflict].waits
            waits = waits and record.state is not State.RESERVED
            left = since + call.data.wait_timeout - lease_now() if waits else 0.0
            if left <= 0:
                return conflict.apply_policy(
                    call, record, puts_back=reply.case == "wait", now_ms=reply.now_ms
                )
            interval = min(left, _wait_interval(record, reply.now_ms))
            await call.runtime.wait_for_change(admission.key, reply.raw, interval)
        elif isinstance(admission, (Answer, PutBack, Drop, Reject)):
            return admission


async def admit(call: Call) -> Admission:
    """Sends one begin, and returns what follows from its reply."""
    try:
        reply = await call.send_begin()
    except StoreUnavailableError as error:
        return without_store(call, error)
    if reply.case == "begun":
        assert call.grant is not None
        return await _granted(call, call.grant)
    try:
        if reply.case == "corrupt":
            raise layout.corrupt(str(call.key))
        record = call.runtime.store.record(call.key, reply.raw)
    except CorruptRecordError as error:
        raise report_refused(call, error) from None
    replaced = record.format == DELEGATED and record.task_id != call.task_id
    if replaced and await _release_replaced(call, record):
        return AGAIN
    if reply.case in ("finished", "send"):
        return Finished(record, sends=reply.case == "send")
    if reply.case == "reused":
        if call.data.generation and record.task_id == call.task_id:
            # This message continues a task that has replaced itself: its arguments may differ.
            call.accept_other_arguments()
            return AGAIN
        return conflict.refuse_reused(call, record)
    key = call.key.of_message(record.task_id) if call.key.message else call.key
    return Held(record, reply, key)


async def _granted(call: Call, grant: Grant) -> Admission:
    """Starts the renewal of a granted lease; returns GRANTED, or what has to happen instead."""
    settings, runtime = call.settings, call.runtime
    try:
        if not settings.may_run(grant.execution.attempt):
            poison = commands.poison(call.key, grant.token, settings.error_ms, call.tail)
            await runtime.execute(poison)
            may_run = False
        else:
            # Redis counts the death only of an execution that has extended its lease. The first one
            # of a key saves that round trip: if it dies early, one more may run. A takeover, or the
            # only attempt that is allowed, must be counted.
            counts = grant.orphaned_seconds is not None or not settings.may_run(2)
            may_run = not counts or await grant.confirm()
    except StoreUnavailableError as error:
        call.grant = None
        return without_store(call, error)
    if not may_run:
        call.grant = None
        return AGAIN
    assert grant.lease is not None
    runtime.start_renewal(grant.lease)
    if grant.token != call.expired_token:
        report(table.BEGUN, call, grant.execution)
        if grant.orphaned_seconds is not None:
            call.report(table.TAKEN_OVER, orphaned_seconds=grant.orphaned_seconds)
    return GRANTED if grant.lease.trusted else await _begin_again(call, grant)


async def _begin_again(call: Call, grant: Grant) -> Admission:
    """Begins again, once, because the lease of `grant` had expired when the reply came.

    The process was suspended meanwhile, or Redis is slow. If the next lease has expired too, the
    call is treated as if Redis were unavailable.
    """
    if grant.token != call.expired_token:
        call.report(table.BEGINS_AGAIN)
        grant.stop_renewal()
        call.grant, call.expired_token = None, grant.token
        return AGAIN  # a begin with the same id returns the current state of the key
    await call.give_back()
    late = StoreUnavailableError("Redis replies later than idempotency_lease allows")
    return without_store(call, late)


async def _release_replaced(call: Call, record: Record) -> bool:
    """Releases the key of another task if its replacement has failed; returns whether it has."""
    error = replacement_error(record, call.settings)
    if error is None:
        return False
    report(table.REPLACEMENT_FAILED, call, record=record, error=error)
    with contextlib.suppress(StoreUnavailableError):  # the begin that follows raises it too
        await call.runtime.execute(commands.release(call.key, record.token, retention_ms=0))
    return True


def _wait_interval(record: Record, now_ms: int) -> float:
    """Returns the seconds until the next begin: the end of the lease changes no record."""
    left = (record.at_ms - now_ms) / 1000
    return min(max(left, MIN_WAIT_INTERVAL), MAX_WAIT_INTERVAL)


def without_store(call: Call, error: StoreUnavailableError) -> Proceed | PutBack:
    """Applies ``on_store_error``: runs the call without protection, puts it back, or raises."""
    policy = call.settings.on_store_error
    outage = call.runtime.store.node_of(call.key).outage
    if (number := outage.count_failure()) is not None:
        event = table.CANNOT_BEGIN if outage.failed_calls == 1 else table.CANNOT_BEGIN_YET
        report(event, call, error=error, like_it=like_it(number))
    report(table.BEGIN_FAILED, call, error=error, policy=policy)
    if policy == "run":
        report(table.UNPROTECTED, call, error=error)
        call.run_unprotected()
        return GRANTED
    if policy == "raise":
        raise report_refused(call, error)
    report(table.STORE_UNAVAILABLE, call)
    return conflict.put_back(call, error, longest=MAX_DELAY)


async def settle(grant: Grant, outcome: Outcome) -> End:
    """Stores `outcome` or releases the key, and returns the end of the call.

    If another execution has taken over, the end may have the outcome of that one.
    """
    call, lease = grant.call, grant.lease
    extension: Extension
    if not grant.protected:
        for extension in call.extensions:
            outcome = extension.ran_unprotected(outcome)
        if isinstance(outcome, Result) and call.host.returns_restored:
            _, outcome = restored(
                outcome.value, call.settings, call.codec.values, key=str(call.key)
            )
        return Answer(outcome)
    expired = lease is not None and not lease.trusted
    if expired and isinstance(outcome, Failure) and isinstance(outcome.error, LeaseLostError):
        return await _abort(grant, outcome)
    settlement = await settlement_of(grant, outcome)
    for extension in call.extensions:
        settled = await extension.settling(settlement)
        if not isinstance(settled, Settlement):
            return settled
        settlement = settled
    if isinstance(settlement, Release):
        return await _release(grant, settlement)
    return await _store(grant, settlement)


async def settle_again(grant: Grant, outcome: Outcome, error: BaseException) -> End:
    """Settles after a signal handler has raised `error` in :func:`settle`.

    The body has ended, so its outcome still has to be stored. An error that ends the process is
    raised afterwards.
    """
    if grant.settled or not grant.protected:
        raise error
    exiting = not isinstance(error, Exception)
    grant.writes_once |= exiting
    try:
        end = await settle(grant, outcome)
    except Exception as second:
        if isinstance(outcome, Result) and not grant.settled:
            grant.call.report(table.OUTCOME_UNSAVED, error=second)
        raise
    if exiting:
        raise error
    grant.call.report(table.ENDED_LATE, error=error)
    return end


async def settlement_of(grant: Grant, outcome: Outcome) -> Settlement:
    """Encodes what has to be stored for `outcome`."""
    call = grant.call
    if grant.steps_body:
        _ = grant.steps  # so that steps of an earlier execution are an extension, too
    settlement = call.host.meaning(outcome)
    settings, key = call.settings, str(call.key)
    place: Any = {"key": key, "token": grant.token}
    outcome, settlement.retention_ms = settlement.outcome, settings.result_ms
    if isinstance(settlement, Complete):
        assert isinstance(outcome, Result)
        if call.host.returns_restored:
            payload, settlement.outcome = restored(
                outcome.value, settings, call.codec.values, key=key
            )
            payload = await call.codec.protect(payload, settings, **place)
        else:
            payload = await call.codec.encode_result(outcome.value, settings, **place)
        settlement.payload, settlement.field = payload, RESULT
    elif isinstance(settlement, Delegate):
        # Celery passes the continuation to the other task, so this one has none to send. If the
        # result of the other task never comes, a call that waits for it runs when the record
        # expires.
        format_ = DELEGATED if settlement.stores_result else RESULT_IGNORED
        settlement.payload = Payload(format_, layout.write_task_id(call.task_id))
    elif isinstance(settlement, Fail):
        assert isinstance(outcome, Failure)
        payload = await call.codec.encode_error(outcome.error, settings, **place)
        settlement.payload, settlement.field = payload, ERROR
        settlement.retention_ms = settings.error_ms
    return settlement


async def _store(grant: Grant, settlement: Settlement) -> End:
    """Stores the outcome of the key."""
    call, delegates = grant.call, isinstance(settlement, Delegate)
    grant.writes_once |= settlement.committed
    try:
        reply = await grant.settle(settle_command(grant, settlement))
    except StoreUnavailableError as error:
        event = table.COMMITTED_ONLY if settlement.committed else table.OUTCOME_UNSAVED
        call.report(event, error=error)
        return Answer(settlement.outcome, unsaved=error)
    if reply.case == "lost" and not settlement.committed:
        if delegates:
            return Answer(settlement.outcome)
        if settlement.payload is not None and settlement.field:
            await call.codec.delete_object(settlement.payload, str(call.key), settlement.field)
        return await _resolve_lost_lease(grant, reply, settlement.outcome)
    if isinstance(settlement, Complete) and settlement.continues:
        call.continuation_token = grant.token
    unsaved = _report_stored(grant, settlement)
    for extension in call.extensions:
        await extension.settled(settlement, reply)
    return Answer(
        settlement.outcome,
        is_own=not delegates,
        result_written=reply.case == "written",
        unsaved=unsaved,
    )


def settle_command(grant: Grant, settlement: Settlement) -> Command:
    """Returns the command that stores the outcome of the key."""
    call, token = grant.call, grant.token
    key, tail, payload = call.key, call.tail, settlement.payload
    retention_ms = settlement.retention_ms
    assert payload is not None
    if isinstance(settlement, Fail):
        return commands.fail(key, token, payload, retention_ms, tail)
    if isinstance(settlement, Delegate):
        return commands.delegate(key, token, payload, settlement.awaited, retention_ms, tail)
    assert isinstance(settlement, Complete)
    sending_ms = call.settings.lease_ms if settlement.continues else 0
    result = key, token, payload, retention_ms, settlement.backend_result
    return commands.complete(*result, tail=tail, sending_ms=sending_ms)


def _report_stored(grant: Grant, settlement: Settlement) -> IdempotencyError | None:
    """Reports that the outcome is stored; if its value is not, returns the error of duplicates."""
    payload, call = settlement.payload, grant.call
    assert payload is not None
    if isinstance(settlement, Delegate):
        end = "it has replaced itself and gets the outcome of its replacement"
        report(table.COMPLETED, call, grant.execution, end=end)
        return None
    failed, error = isinstance(settlement, Fail), None
    if not payload.format and payload.body != NOT_STORED:
        ran = f"ran and raised {type(settlement.error).__name__}" if failed else "ran"
        call.report(table.NOT_STORED, end=ran, reason=payload.body.decode())
        error = not_stored(payload, str(call.key), settlement.field)
    if failed:
        gets = "this error" if payload.format else "ResultNotStoredError"
        call.report(table.FAILED, error=settlement.error, outcome=gets)
    else:
        end = "its result is stored" if payload.format else "its result is not kept"
        report(table.COMPLETED, call, grant.execution, end=end)
    return error


async def _release(grant: Grant, settlement: Release) -> End:
    """Frees the key, or reserves it for a retry."""
    call, outcome, error = grant.call, settlement.outcome, settlement.error
    try:
        reply = await grant.release(settlement)
    except StoreUnavailableError as failure:
        call.report(table.NOT_RELEASED, error=failure)
        return Answer(outcome)
    if reply.case == "ok":
        hold = settlement.hold
        free = (
            "keeps its steps for a call with the same arguments" if grant.steps_body else "is free"
        )
        call.report(
            table.RELEASED,
            end=f"ran and raised {type(error).__name__}" if error else "ran",
            key_is=f"stays reserved for its retry for {hold:.1f} s" if hold else free,
            error=error,
            reserved_seconds=hold or None,
        )
        return Answer(outcome)
    if settlement.hold or not isinstance(error, Exception):
        # The outcome of the other execution is of no use here: a retry is already published, or the
        # process is about to exit.
        grant.report_lease_lost(reply.raw)
        return Answer(outcome)
    return await _resolve_lost_lease(grant, reply, outcome)


async def _abort(grant: Grant, outcome: Failure) -> End:
    """Ends a call whose body has raised LeaseLostError, because its lease is lost or has expired.

    If no other execution has taken over, the key is released, and the call put back.
    """
    grant.call.end_extensions()
    with contextlib.suppress(StoreUnavailableError):
        reply = await grant.release()
        if reply.case != "ok":
            return await _resolve_lost_lease(grant, reply, outcome)
    return conflict.put_back(grant.call, outcome.error)


async def _resolve_lost_lease(grant: Grant, reply: Reply, outcome: Outcome) -> End:
    """Ends a call whose outcome Redis has refused, since another execution has taken over.

    Args:
        reply: has the record of the other execution. The call gets its outcome, or is put back if
            there is none yet. Without a record, the call gets `outcome`, its own.
    """
    grant.report_lease_lost(reply.raw)
    call = grant.call
    try:
        record = call.runtime.store.record(call.key, reply.raw)
    except CorruptRecordError:  # it is damaged, or gone
        return Answer(outcome)
    # A call with a continuation is put back, because only the reply to a begin decides whether to
    # send that. A message that a newer one has superseded is put back too: after its next begin,
    # `extensions.newest` finds the outcome of the newer one.
    answered = record.state.finished and not layout.is_superseded(record)
    if answered and (layout.is_replaced(record) or not call.data.continues):
        # The call is put back below if the outcome is not available: a replacement of the other
        # task still runs, or the offload storage does not reply.
        with contextlib.suppress(NotReadyError, StoreUnavailableError):
            return await replay(call, record)
    lost = LeaseLostError(f"{call.key}: another execution has taken over")
    return conflict.put_back(call, lost)
