"""A message of a task as a call of the executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.states import FAILURE, PROPAGATE_STATES, SUCCESS
from celery.utils.nodenames import gethostname

from celery_idempotent.clock import monotonic
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.events.table import Event
from celery_idempotent.executor.call import Delegate, Disposition, Fail, Release
from celery_idempotent.executor.continuation import Continuation
from celery_idempotent.executor.execution import Execution
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.payload.result_codec import is_storable
from celery_idempotent.record.record import Record, State
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.settings import Settings
from celery_idempotent.store.commands import BackendResult
from celery_idempotent.task import (
    canvas,
    celery_log,
    current_call,
    message_headers,
    outbox,
    own_call,
    republish,
)
from celery_idempotent.task.backend_result import encode_result
from celery_idempotent.task.message_headers import MessageHeaders
from celery_idempotent.task.requeue import RequeuePause, hold_for, longest_wait, seconds_until
from celery_idempotent.task.reservation import is_stale

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_idempotent.task.task import IdempotentTask


class TaskCall:
    """One message of a task in the worker that received it."""

    #: The result backend serializes the value for those who read it.
    returns_restored = False
    #: False if the soft limit of the message covers more than this call.
    has_own_soft_limit = True
    #: False if what follows the message does not follow this call.
    may_continue = True
    label = ""

    @staticmethod
    def of(request: Context | None) -> TaskCall | None:
        """Returns the call of `request`, None if it is not protected or has not begun."""
        return getattr(request, "idempotency_call", None)

    def __init__(
        self,
        task: IdempotentTask,
        request: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Key,
        headers: MessageHeaders,
        settings: Settings,
        task_id: str,
    ) -> None:
        self.sender = task
        self.task_id = task_id
        self.worker = worker_name(request.hostname, os.getpid())
        self.key = key.of_message(task_id) if settings.runs_again else key
        self.settings = settings
        if headers.result_ttl is not None:
            self.settings = replace(settings, result_ttl=headers.result_ttl)
        self.unanswered_ids = headers.unanswered_ids
        self.requeue_count = headers.requeue_count
        self.rollback_count = headers.rollback_count
        self.root, self.generation = canvas.identity_of(key, request, task_id, headers.root)
        self.soft_limit: SoftLimit | None = None
        if self.has_own_soft_limit and not request.is_eager:
            self.soft_limit = current_call.soft_limit_of(request)
        self.own_outcome = False
        self.result_written = False
        self.decision = ""
        self.rescheduled: Release | None = None
        #: Set if the task has replaced itself: another task has its id and its continuation.
        self.replaced: Delegate | None = None
        self.ending: BaseException | None = None
        self.continuation: Continuation | None = None
        self.continuation_sent = False
        #: Read now, because older versions of Celery empty `request.chain` when they send it.
        self.continues = self.may_continue and canvas.has_continuation(request)
        self.execution: Execution | None = None
        self._request = request
        self.began_at = monotonic()
        self._args = args
        self._kwargs = kwargs

    @property
    def wait_ms(self) -> int:
        """How long the next turn is reserved for the message, but not beyond its expiry."""
        wait_ms, expires = self.settings.wait_ms, self._request.expires
        if self._request.is_eager:
            return 0  # it does not come back
        if not wait_ms or expires is None:
            return wait_ms
        return max(1, min(wait_ms, round(seconds_until(expires) * 1000)))

    @property
    def wait_timeout(self) -> float:
        """Seconds as configured, but no more than the message's time limits allow."""
        return min(self.settings.wait_timeout, current_call.wait_within_time_limits(self._request))

    @property
    def required_generation(self) -> int:
        """What the row has to await before this message may run; 0 if it needs no row."""
        return canvas.required_generation(self.key, self._request, self.task_id)

    @property
    def sending_ms(self) -> int | None:
        """How long sending what follows may take; None if nothing does."""
        return self.settings.lease_ms if self.continues else None

    def run(self, execution: Execution) -> Any:
        """Runs the body of the task, including ``autoretry_for`` and similar wrappers."""
        self.execution = execution
        self._request.idempotency_call = self
        self._request.idempotency_without_body = False
        self.sender.before_start(self.task_id, self._args, self._kwargs)
        return own_call.run(self.sender, self.sender.run, self._args, self._kwargs)

    def backend_result(self, value: Any) -> BackendResult | None:
        """Returns the result for the record's script to write, where Celery would do no more."""
        request = self._request
        if (
            request.is_eager
            or request.ignore_result
            or self.continues
            or canvas.has_continuation(request)
            or self.sender.idempotency_configuration.fusion_obstacle
        ):
            return None
        return encode_result(self.sender.backend, value, request, self.settings.max_result_size)

    @property
    def dropped_continuation(self) -> bool:
        """Whether the body has removed its continuation, such as the rest of a chain."""
        return self.continues and not canvas.continues_on_success(self._request)

    def disposition(self, error: BaseException) -> Disposition:
        """Returns what an error of the body means for the key.

        A retry reserves the key for its task id. Errors in ``idempotency_replay_errors`` are
        stored. All others release the key.
        """
        if self.replaced:
            return self.replaced
        if self.rescheduled:
            return self.rescheduled
        if isinstance(error, Retry):
            return self._until(_options_of(error), self.generation + 1)
        if isinstance(error, (Ignore, Reject)):
            return Release()
        if isinstance(error, self.settings.replay_errors):
            return Fail()
        return Release(final=self._ends(error))

    def _ends(self, error: BaseException) -> bool:
        """Returns whether Celery stores `error` and acknowledges the message."""
        stored = isinstance(error, Exception) and not isinstance(error, MemoryError)
        return stored and not self._request.is_eager and acknowledged(self.sender, "failure")

    @property
    def replacement_generation(self) -> int:
        """Generation of the first message of a task that replaces this one."""
        return (self.generation // canvas.GENERATIONS + 1) * canvas.GENERATIONS

    def forget_earlier_error(self) -> None:
        """Lets the result backend forget an earlier end of this task id.

        It would be taken for the end of the task that replaces this one, and free the key.
        """
        if self._request.is_eager:
            return
        try:
            if self.sender.AsyncResult(self.task_id).state in PROPAGATE_STATES:
                self.sender.backend.forget(self.task_id)
        except Exception as error:
            report(table.RESULT_UNREADABLE, self, error=error)

    def replaced_by_canvas(self, reports_result: bool) -> None:
        """Notes that the canvas that replaces the task was published.

        Args:
            reports_result: whether its outcome can be read under the task's id.
        """
        self.replaced = Delegate(self.replacement_generation, reports_result)

    def retry_published(self, retry: Retry) -> None:
        """Notes that `retry` was published: the key is reserved for it, however this run ends."""
        held = self._until(_options_of(retry), self.generation + 1)
        if self.rescheduled is None or held.hold > self.rescheduled.hold:
            self.rescheduled = held

    def _until(self, options: Mapping[str, Any], awaited: int) -> Release:
        return Release(hold=hold_for(options, self.settings.lease), awaited=awaited)

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """Returns or raises the outcome that the result backend has, for a redelivered message.

        Callers may have read it already, so a redelivery must not end with another error.

        Raises:
            IdempotencyError: `error`, if the backend has no outcome.
        """
        if record.task_id == self.task_id and not self._request.is_eager:
            result = self.sender.AsyncResult(self.task_id)
            try:
                state, value = result.state, result.result
            except Exception as backend_error:
                raise error from backend_error
            if state == SUCCESS:
                return value
            if state == FAILURE and is_storable(type(value)):
                raise value
        raise error

    def store_messages(self, functions: Sequence[Callable[[], Any]]) -> bytes:
        """Returns the messages that `functions` publish on commit."""
        return outbox.store(str(self.key), self.sender.app, functions)

    def publish_messages(self, messages: Any) -> None:
        """Publishes what :meth:`store_messages` returned."""
        outbox.publish(str(self.key), self.sender.app, self.task_id, messages)

    def replayed(self, record: Record) -> None:
        """Sends what follows, unless another delivery of this message has sent it."""
        self.refer_to(record, replayed=True)
        self._request.idempotency_call = self
        self._request.idempotency_without_body = True
        if self.continuation is not None:
            self.continuation.start()
        elif self.continuation_sent:
            canvas.drop_continuation(self._request)

    def blocked(self, record: Record) -> None:
        """Leaves a reference to `record`, so that this task id leads to it."""
        self.refer_to(record, replayed=False)

    def is_stale(self, reservation: Reservation) -> bool:
        """Returns whether the result backend has the message of the reservation as ended."""
        return reservation.task_id != self.task_id and is_stale(self.sender, reservation)

    def refer_to(self, record: Record, *, replayed: bool) -> None:
        """Leaves a reference to the record of another task id."""
        if record.task_id == self.task_id:
            return
        failed = record.state is State.FAILED
        keep_ms = self.settings.error_ms if failed else self.settings.result_ms
        if not record.state.finished:
            keep_ms += self.settings.lease_ms
        store = self.sender.idempotency_configuration.executor.store
        store.refer(self.task_id, record, replayed=replayed, keep_ms=keep_ms)

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """Publishes the message again under its id, then lets this copy be acknowledged.

        In this order, because a broker may acknowledge the original together with a copy. If
        publishing fails, this copy is requeued; if the broker is not available for that either, it
        will redeliver the copy by itself.
        """
        if self._request.is_eager:
            report(table.RAISES, self, reason=reason)
            raise reason
        headers = message_headers.with_derived_key(
            self._request.headers,
            self.key,
            self.task_id,
            self.root,
            self.requeue_count + 1,
            unanswered_ids,
            self.rollback_count,
        )
        self.publish_again(self.sender, seconds, headers, reason)

    def publish_again(
        self, task: Task, seconds: float, headers: dict[str, Any] | None, reason: BaseException
    ) -> NoReturn:
        """Publishes the message of `task`, then lets this copy be acknowledged.

        Its expiry is kept in a header only. Celery would pass it to the broker too, which drops
        every expired message, while a worker runs one whose execution began in time.
        """
        request = self._request
        expires = request.expires
        if expires and task.app.conf.task_protocol == 2:
            headers, expires = {**(headers or {}), "expires": expires}, None
        pause = RequeuePause(task, request, self.began_at)
        seconds = min(seconds, longest_wait(task.app))
        options = {
            "countdown": seconds,
            "retries": request.retries,
            "headers": headers,
            "expires": expires,
            "add_to_parent": False,
        }
        while True:
            try:
                signature = task.signature_from_request(
                    request,
                    request.args,
                    request.kwargs,
                    **republish.adapt_to_delayed_delivery(task.app, request.delivery_info, options),
                )
                if task is not self.sender:
                    republish.copy_properties(signature, request, options)
                with republish.confirming_producer(task.app) as producer:
                    signature.apply_async(producer=producer)
                break
            except Exception as error:
                if not pause.wait(error):
                    self._report_end(table.RETURNED, error=str(error), reason=reason)
                    message = f"{reason}; and the message cannot be published again: {error}"
                    raise Reject(message, requeue=True) from None
        self._report_end(table.REQUEUED, seconds=seconds, reason=reason)
        raise Ignore from reason

    def _report_end(self, event: Event, **fields: Any) -> None:
        """Logs how this delivery ends, in place of Celery's line, which would not show it."""
        report(event, self, **fields)
        celery_log.leave_out_end(self._request)

    def ignore(self) -> NoReturn:
        """Acknowledges the message; its task id gets no state."""
        celery_log.leave_out_end(self._request)
        raise Ignore

    def reject(self, reason: str) -> NoReturn:
        """Rejects the message without requeueing it, for the broker's dead-letter queue."""
        celery_log.leave_out_end(self._request)
        raise Reject(reason, requeue=False)


def _options_of(retry: Retry) -> Mapping[str, Any]:
    """Returns the options that the message of `retry` is published with, as far as known."""
    options: Mapping[str, Any] = retry.sig.options if retry.sig else {"eta": retry.when}
    return options


def acknowledged(task: Task, after: str) -> bool:
    """Returns whether a message of `task` is acknowledged after a ``failure`` or ``timeout``."""
    either = task.acks_on_failure_or_timeout
    acks = getattr(task, f"acks_on_{after}", either)  # one option for both before Celery 5.7
    return not task.acks_late or bool(acks)


@lru_cache(16)
def worker_name(nodename: str | None, pid: int) -> str:
    """Returns ``nodename/pid``, the name of a process that runs executions."""
    return f"{nodename or gethostname()}/{pid}"
