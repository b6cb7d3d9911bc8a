"""Runs a message of a task through the flow, in the process that runs the task.

`TaskHost` hands the message to the flow as a call, runs the body, decides what its end means for
the key, and carries out the end of the call: it returns, raises, or puts the message back.

Celery keeps the request of a task in the task's own thread. Code of the task that runs in another
thread finds its call in the context, if the thread has the context of the body
(``asyncio.to_thread``, anyio, ``contextvars.copy_context().run``).

Celery's tracer also works before the flow (it may store the state STARTED) and after it (it stores
the result). A soft time limit that is raised there must not become the outcome. Therefore a message
has one `SoftLimit` from the start of its task to the end.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from celery import Task, current_task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.states import FAILURE, SUCCESS
from celery.utils.nodenames import gethostname
from kombu.utils.encoding import bytes_to_str
from kombu.utils.imports import symbol_by_name

from celery_idempotent.core import worker
from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow import soft_limit
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.execution import Execution
from celery_idempotent.core.flow.flow import execute
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.soft_limit import SoftLimit
from celery_idempotent.core.flow.thread import run_flow
from celery_idempotent.core.flow.values import (
    Answer,
    Complete,
    Delegate,
    Drop,
    End,
    Fail,
    Failure,
    Outcome,
    PutBack,
    Release,
    Result,
    Settlement,
)
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.result_codec import is_storable
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.commands import BackendResult
from celery_idempotent.core.task.message import continuation
from celery_idempotent.core.task.message.message_headers import MessageHeaders
from celery_idempotent.core.task.receive import user_methods
from celery_idempotent.errors import IdempotencyError

#: The extension of a rerun: a message that forgets an outcome before it begins.
_RERUN = "celery_idempotent.extensions.rerun:ForgetFirst"
#: The argument of the Ignore with which a message ends that was put back.
PUT_BACK = "put back"
#: The host of the message whose body runs in this context.
current_host: ContextVar[Any] = ContextVar("idempotent_host", default=None)
#: The host of the message whose result a script has written into the result backend. `task.backend`
#: resets it when Celery is about to write the result again.
result_written: ContextVar[Any] = ContextVar("idempotent_result_written", default=None)
#: The hosts of the messages that this process runs.
running: set[Any] = set()


class TaskHost:
    """Runs one message of a task through the flow, in the worker that has received it."""

    #: The value is not restored: callers read it from the result backend, which serializes it.
    returns_restored = False

    def __init__(
        self,
        task: Task,
        configuration: TaskConfiguration,
        request: Context,
        task_id: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Key,
        headers: MessageHeaders,
    ) -> None:
        self.sender, self._configuration, self.request = task, configuration, request
        self._args, self._kwargs = args, kwargs
        settings = configuration.settings
        if headers.result_ttl is not None:
            settings = replace(settings, result_ttl=headers.result_ttl)
        #: The task id in the type that its publisher has passed. The body may change `request.id`.
        self._message_id = request.id
        #: The reservation for a retry, once that was published; `retry_published` sets it.
        self.rescheduled: Release | None = None
        #: The end of a task that has replaced itself: the other task has its id and its
        #: continuation. `IdempotentTask.replace` sets it.
        self.replaced: Delegate | None = None
        #: The Ignore or Reject by which a published replacement, or a retry that cannot be
        #: published, ends the message, whatever the body does then. `IdempotentTask` sets it.
        self.ending: BaseException | None = None
        #: The running execution; None before the body.
        self.execution: Execution | None = None
        #: When the message reached the task (seconds of `monotonic`): its time limit counts from
        #: then.
        self.began_at = monotonic()
        hold_ms = settings.hold_ms
        if hold_ms and request.expires is not None:
            from celery_idempotent.core.task.message.eta import seconds_until

            hold_ms = max(1, min(hold_ms, round(seconds_until(request.expires) * 1000)))
        self.data = CallData(
            sender=task,
            key=configuration.record_key(key, task_id),
            settings=settings,
            task_id=task_id,
            worker=worker_name(request.hostname, os.getpid()),
            wait_timeout=0.0,
            tail=configuration.tail_of(args, kwargs),
            generation=continuation.generation_of(request),
            hold_ms=hold_ms,
            put_back_count=headers.put_back_count,
            rollback_count=headers.rollback_count,
            # Read here, because older versions of Celery empty `request.chain` when they send it.
            # In shadow, Celery sends the continuation regardless of the record.
            continues=not configuration.in_shadow and continuation.has_continuation(request),
        )
        self.headers, extensions = headers, configuration.settings.extensions
        if headers.forgets and not configuration.in_shadow:
            extensions = (symbol_by_name(_RERUN), *extensions)
        executor = configuration.executor
        self.call = Call(self.data, self, executor.runtime, executor.codec, extensions)

    @property
    def app(self) -> Any:
        """The app of the task."""
        return self.sender.app

    @property
    def in_flow(self) -> TaskHost:
        """This host, after it has restored the id of the message that the body may have changed."""
        self.request.id = self._message_id
        return self

    def execute(self) -> Any:
        """Takes the message through the flow; returns or raises its outcome."""
        end: End | None = None
        try:
            end = self._flow()
            return self._perform(end)
        except BaseException as error:
            self._return_to_queue(error)
            raise
        finally:
            grant = self.call.grant
            began = (grant is not None and grant.token) or isinstance(end, PutBack)
            if self.data.settings.deduplicates and not began and worker.counters:
                worker.counters.note_unbegun()

    def _return_to_queue(self, error: BaseException) -> None:
        """Raises Reject if the pool has killed the greenlet of a message that is not revoked.

        Celery would acknowledge the message, for example in a cold shutdown.
        """
        greenlet = sys.modules.get("greenlet")
        if greenlet is not None and isinstance(error, greenlet.GreenletExit):
            from celery.worker.state import revoked

            if not self.request.is_eager and self.request.id not in revoked:
                raise Reject("the greenlet was killed", requeue=True) from None

    def _flow(self) -> End:
        """Runs the flow, with this host as the current one of the context."""
        outer = current_host.get()
        try:
            current_host.set(self)
            if self.request.is_eager:  # a limit applies to the message around this call
                return run_flow(partial(execute, self.call))
            running.add(self)
            return run_flow(partial(execute, self.call), soft_limit_of(self.request))
        finally:
            self.request.id = self._message_id
            running.discard(self)
            current_host.set(outer)

    def run(self, execution: Execution) -> Any:
        """Runs the body of the task, including ``autoretry_for`` and similar wrappers."""
        self.execution = execution
        self.request.idempotency_without_body = False
        self.sender.before_start(self.data.task_id, self._args, self._kwargs)
        return user_methods.run(self.sender, self.sender.run, self._args, self._kwargs)

    def use_arguments(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Replaces the arguments of the body, for `extensions.newest`."""
        self._args, self._kwargs = tuple(args), kwargs

    def _backend_result(self, value: Any) -> BackendResult | None:
        """Returns the result for the script to write; None if that is left to Celery."""
        request = self.request
        if (
            request.is_eager
            or request.ignore_result
            or self.data.continues
            or self._configuration.fusion_obstacle
        ):
            return None
        try:
            backend = self.sender.backend
            meta = backend._get_result_meta(  # noqa: SLF001 - no public method returns it
                result=backend.encode_result(value, SUCCESS),
                state=SUCCESS,
                traceback=None,
                request=request,
            )
            meta["task_id"] = bytes_to_str(self._message_id)
            name, encoded = backend.get_key_for_task(self._message_id), backend.encode(meta)
        except Exception:
            return None  # Celery will report that it cannot be encoded
        fits = self.data.settings.fits(encoded)
        return BackendResult(name, encoded, backend.expires or 0) if fits else None

    def meaning(self, outcome: Outcome) -> Settlement:
        """Returns what the end of the body means for the key.

        A retry reserves the key for its task id. An error of ``replay_errors`` is stored. Any other
        error releases the key.
        """
        # Also set here, because a soft time limit may have ended the execution before `run` set it.
        # The outcome counts as that of a body, so `on_failure` and similar methods must run.
        self.request.idempotency_without_body = False
        if isinstance(outcome, Result):
            if self.rescheduled is not None:
                return replace(self.rescheduled, outcome=outcome)
            if self.ending is None:
                request = self.request
                if request.is_eager and isinstance(outcome.value, Retry):
                    return replace(self._reserved_for(outcome.value), outcome=outcome)
                follows = continuation.has_continuation(request)
                result = None if follows else self._backend_result(outcome.value)
                return Complete(
                    outcome, continues=follows and self.data.continues, backend_result=result
                )
            outcome = Failure(self.ending)
        error = outcome.error
        if ended := self.replaced or self.rescheduled:
            return replace(ended, outcome=outcome)
        if isinstance(error, Retry):
            return replace(self._reserved_for(error), outcome=outcome)
        if isinstance(error, (Ignore, Reject)):
            return Release(outcome)
        if self.data.settings.replays(error):
            return Fail(outcome)
        died = not self.request.is_eager and _exits_by_itself(error)
        return Release(outcome, died=died)

    def retry_published(self, retry: Retry) -> None:
        """Notes that `retry` was published: the key is reserved for it, however this run ends."""
        reserved = self._reserved_for(retry)
        if self.rescheduled is None or reserved.hold > self.rescheduled.hold:
            self.rescheduled = reserved

    def _reserved_for(self, retry: Retry) -> Release:
        """Returns the reservation of the key for `retry`."""
        options = retry.sig.options if retry.sig else {"eta": retry.when}
        # Only the level of replacement is taken from this message: the body may have changed the
        # number of its retries, which is in the options of the next one.
        depth = self.data.generation - self.data.generation % continuation.GENERATIONS
        awaited = depth + int(options.get("retries") or self.request.retries + 1)
        delay = {} if self.request.is_eager else options
        from celery_idempotent.core.task.message.eta import hold_for

        return Release(hold=hold_for(delay, self.data.settings.lease), awaited=awaited)

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Returns or raises the outcome that the result backend has, for a redelivered message.

        Callers may have read that outcome: the redelivery must not end with another error.

        Raises:
            IdempotencyError: `error`, if the backend has no outcome.
        """
        if record.task_id == self.data.task_id and not self.request.is_eager:
            result = self.sender.AsyncResult(self.data.task_id)
            try:
                state, value = result.state, result.result
            except Exception as backend_error:
                raise error from backend_error
            if state == SUCCESS:
                return value
            if state == FAILURE and is_storable(type(value)):
                raise value
        raise error

    def difference(self, fingerprint: bytes) -> str:
        """Describes how the arguments differ from those of another call with the key."""
        rule, key = self._configuration.rule, self.call.key
        return rule.difference(self._args, self._kwargs, key, fingerprint)

    def _perform(self, end: End) -> Any:
        """Carries out `end` after the flow; returns or raises the outcome of the message."""
        if isinstance(end, PutBack) and self.request.is_eager:
            report(table.RAISES, self.call, reason=end.reason)
            end = Answer(Failure(end.reason), end.record)
        written = end.record is not None and self._refer_to(end.record, end)
        if isinstance(end, Answer):
            if isinstance(end.outcome, Failure) and self._has_ended(end, end.outcome.error):
                self._keep_message()
            if end.continuation_sent:
                continuation.drop_continuation(self.request)
            if end.result_written or written:
                result_written.set(self)
            return end.outcome.get()
        # Read by `celery_log`, which suppresses Celery's line: this package has logged the end.
        self.request.idempotency_end_logged = True
        if isinstance(end, PutBack):
            from celery_idempotent.core.task.publish.put_back import put_back

            put_back(self.call, self.request, end, self.headers, self.began_at)
            raise Ignore(PUT_BACK)
        if isinstance(end, Drop):
            raise Ignore  # Celery acknowledges the message, and its task id gets no state
        self._keep_message()
        raise Reject(end.reason, requeue=False)

    def _has_ended(self, answer: Answer, error: BaseException) -> bool:
        """Returns whether an execution of this message has ended the key with `error`, for good."""
        record = answer.record
        if record is None:
            return answer.is_own and self.data.settings.replays(error)
        is_own = record.state is State.FAILED and record.task_id == self.data.task_id
        return is_own and not layout.is_replaced(record)

    def _keep_message(self) -> None:
        """Keeps the message for a person to rerun, unless it is a replacement."""
        request, in_shadow = self.request, self._configuration.in_shadow
        may_store = self.data.settings.store_result and not request.replaced_task_nesting
        if may_store and not (request.is_eager or in_shadow):
            from celery_idempotent.core.task.publish import kept_message

            kept_message.keep(self.call, request)

    def _refer_to(self, record: Record, end: End) -> bool:
        """Writes a reference from this task id to the `record` of another one.

        It also writes the result of a replay, if that saves a round trip. It writes nothing if the
        record is this task id's own. Returns whether the result was written.
        """
        if record.task_id == self.data.task_id:
            return False
        from celery_idempotent.core.store import reference

        replay = end if isinstance(end, Answer) and end.replayed else None
        settings, failed = self.data.settings, record.state is State.FAILED
        retention_ms = settings.error_ms if failed else settings.result_ms
        if not record.state.finished:
            retention_ms += settings.lease_ms
        store = self._configuration.executor.store
        prefix, task_id = store.config.prefix, self.data.task_id
        became = reference.REPLAYED if replay else end.became
        refer = reference.command(prefix, task_id, record, became, retention_ms)
        if replay is not None and isinstance(replay.outcome, Result):
            result = self._backend_result(replay.outcome.value)
            if result and run_sync(store.write_result(self.call.key, result, refer)):
                return True
        store.refer(refer)
        return False


def host_in_context(task: Task) -> TaskHost | None:
    """Returns the host of the message of `task` whose context this is; None for a plain call.

    Raises:
        IdempotencyError: if the task is running in this process, and this thread has no context: it
            may belong to any of the running calls, or to none.
    """
    host = current_host.get()
    if host is not None:
        return host.in_flow if host.sender.name == task.name else None
    if not current_task and any(
        other.execution is not None and other.sender.name == task.name for other in list(running)
    ):
        raise IdempotencyError(
            f"self.idempotency of {task.name} is not available in this thread: take "
            "`execution = self.idempotency` in the task's body, and pass that to the thread"
        )
    return None


def soft_limit_of(request: Context) -> SoftLimit:
    """Returns the soft limit of the message of `request`."""
    limit: SoftLimit = request.__dict__.setdefault("idempotency_soft_limit", SoftLimit())
    return limit


def _soft_limit_of_current_message() -> SoftLimit | None:
    """Returns the soft limit of the message that Celery's tracer runs in this thread, if any."""
    task = current_task
    if not task or not hasattr(task, "idempotency_record"):
        return None
    request = task.request_stack.top
    # An eager call has the limit of the message whose task made the call.
    if request is None or request.called_directly or request.is_eager:
        return None
    return soft_limit_of(request)


soft_limit.of_message = _soft_limit_of_current_message


def acknowledged(task: Task, after: str) -> bool:
    """Returns whether a message of `task` is acknowledged after a ``failure`` or ``timeout``."""
    either = task.acks_on_failure_or_timeout
    acks = getattr(task, f"acks_on_{after}", either)  # one option for both before Celery 5.7
    return not task.acks_late or bool(acks)


@lru_cache(16)
def worker_name(nodename: str | None, pid: int) -> str:
    """Returns ``nodename/pid``, the name of a process that runs executions."""
    return f"{nodename or gethostname()}/{pid}"


def _exits_by_itself(error: BaseException) -> bool:
    """Returns whether the body ends its process; a shutdown of the worker does not count.

    On shutdown, Celery raises a subclass of SystemExit; on a signal, billiard's code is negative.
    """
    if type(error) is SystemExit:
        return not (isinstance(error.code, int) and error.code < 0)
    return isinstance(error, KeyboardInterrupt)
