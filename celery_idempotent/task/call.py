"""A message of a task as a call of the executor.

Celery logs a message that was requeued as "ignored", like one that is ignored, and a rejected one
with a traceback. The package logs what became of either, so Celery's line is left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

from celery import Task
from celery._state import get_current_task
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, Retry
from celery.states import FAILURE, PROPAGATE_STATES, SUCCESS
from celery.utils.nodenames import gethostname
from kombu.utils.encoding import bytes_to_str

from celery_idempotent.clock import monotonic
from celery_idempotent.configuration.configuration import TaskConfiguration
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.events.table import Event
from celery_idempotent.executor.call import Delegate, Disposition, Fail, Release
from celery_idempotent.executor.continuation import Continuation
from celery_idempotent.executor.execution import Execution
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.payload.stored_error import is_storable
from celery_idempotent.record.record import Record, State
from celery_idempotent.record.reservation import Reservation
from celery_idempotent.store.commands import BackendResult
from celery_idempotent.task import canvas, message_headers, outbox, overrides, republish
from celery_idempotent.task.key_resolution import completes_key
from celery_idempotent.task.message_headers import MessageHeaders
from celery_idempotent.task.publish import is_stale
from celery_idempotent.task.republish import RequeuePause, hold_for, longest_wait, seconds_until
from celery_idempotent.task.time_limits import soft_limit_of, wait_within_time_limits


class TaskCall:
    """One message of a task in the worker that received it."""

    #: The result backend serializes the value for those who read it.
    returns_restored = False
    #: False if the message has more calls: its soft limit covers them, and what follows it follows
    #: all of them.
    is_whole_message = True

    @staticmethod
    def of(request: Context | None) -> TaskCall | None:
        """Returns the call of `request`, None if it is not protected or has not begun."""
        return getattr(request, "idempotency_call", None)

    def __init__(
        self,
        task: Task,
        configuration: TaskConfiguration,
        request: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Key,
        headers: MessageHeaders,
        item_id: str | None = None,
    ) -> None:
        self.sender, self._configuration, self._request = task, configuration, request
        self._args, self._kwargs = args, kwargs
        self.settings = configuration.settings
        if headers.result_ttl is not None:
            self.settings = replace(self.settings, result_ttl=headers.result_ttl)
        self.task_id = task_id = item_id or request.id
        self.worker = worker_name(request.hostname, os.getpid())
        self.key = configuration.record_key(key, task_id)
        self.label = configuration.label.of(args, kwargs) if configuration.label else ""
        self.unanswered_ids = headers.unanswered_ids
        self.requeue_count = headers.requeue_count
        self.rollback_count = headers.rollback_count
        self.root, self.generation = canvas.identity_of(key, request, task_id, headers.root)
        self.soft_limit: SoftLimit | None = None
        if self.is_whole_message and not request.is_eager:
            self.soft_limit = soft_limit_of(request)
        self.own_outcome = self.result_written = False
        self.decision = ""
        self.rescheduled: Release | None = None
        #: Set if the task has replaced itself: another task has its id and its continuation.
        self.replaced: Delegate | None = None
        self.ending: BaseException | None = None
        self.continuation: Continuation | None = None
        self.continuation_sent = False
        #: Read now, because older versions of Celery empty `request.chain` when they send it.
        self.continues = self.is_whole_message and canvas.has_continuation(request)
        self.execution: Execution | None = None
        self.began_at = monotonic()

    @property
    def wait_ms(self) -> int:
        """How long the next turn is reserved for the message, but not beyond its expiry."""
        wait_ms, expires = self.settings.wait_ms, self._request.expires
        if self._request.is_eager:
            return 0  # it does not come back
        if wait_ms and expires is not None:
            return max(1, min(wait_ms, round(seconds_until(expires) * 1000)))
        return wait_ms

    @property
    def wait_timeout(self) -> float:
        """Seconds as configured, but no more than the message's time limits allow."""
        return min(self.settings.wait_timeout, wait_within_time_limits(self._request))

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
        return overrides.run(self.sender, self.sender.run, self._args, self._kwargs)

    def backend_result(self, value: Any) -> BackendResult | None:
        """Returns the result for the record's script to write, where Celery would do no more."""
        request = self._request
        if (
            request.is_eager
            or request.ignore_result
            or self.continues
            or canvas.has_continuation(request)
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
            meta["task_id"] = bytes_to_str(request.id)
            name, encoded = backend.get_key_for_task(request.id), backend.encode(meta)
        except Exception:
            return None  # it cannot be encoded, which Celery will report
        fits = len(encoded) <= self.settings.max_result_size
        return BackendResult(name, encoded, backend.expires or 0) if fits else None

    @property
    def dropped_continuation(self) -> bool:
        """Whether the body has removed its continuation, such as the rest of a chain."""
        request = self._request
        return self.continues and not (request.callbacks or request.chain or request.chord)

    def disposition(self, error: BaseException) -> Disposition:
        """Returns what an error of the body means for the key.

        A retry reserves the key for its task id. Errors in ``idempotency_replay_errors`` are
        stored. All others release the key.
        """
        if ended := self.replaced or self.rescheduled:
            return ended
        if isinstance(error, Retry):
            return self._reserved_for(error)
        if isinstance(error, (Ignore, Reject)):
            return Release()
        if isinstance(error, self.settings.replay_errors):
            return Fail()
        # Whether Celery stores the error and acknowledges the message.
        stored = isinstance(error, Exception) and not isinstance(error, MemoryError)
        acks = not self._request.is_eager and acknowledged(self.sender, "failure")
        return Release(final=stored and acks)

    def replacement(self, sig: Signature) -> Delegate:
        """Prepares `sig` to replace the task, and returns what follows from that for the key."""
        in_shadow, request = self._configuration.in_shadow, self._request
        generation, mark = (self.generation // canvas.GENERATIONS + 1) * canvas.GENERATIONS, ""
        if self.settings.transaction is not None and not in_shadow:
            mark = canvas.commit_mark(generation, self.settings.result_ttl)
        canvas.mark_replaced(sig, self.key, self.root, request, mark)
        if not in_shadow and not request.is_eager:
            # An earlier end of this task id would be taken for that of the task that replaces this
            # one, and free the key.
            try:
                if self.sender.AsyncResult(self.task_id).state in PROPAGATE_STATES:
                    self.sender.backend.forget(self.task_id)
            except Exception as error:
                report(table.RESULT_UNREADABLE, self, error=error)
        last = canvas.last_signature(sig)
        return Delegate(
            generation,
            last is None
            or not canvas.ignores_result(last)
            or completes_key(self._configuration, request, last, self.key),
        )

    def retry_published(self, retry: Retry) -> None:
        """Notes that `retry` was published: the key is reserved for it, however this run ends."""
        held = self._reserved_for(retry)
        if self.rescheduled is None or held.hold > self.rescheduled.hold:
            self.rescheduled = held

    def _reserved_for(self, retry: Retry) -> Release:
        options = retry.sig.options if retry.sig else {"eta": retry.when}
        return Release(hold_for(options, self.settings.lease), self.generation + 1)

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
        store = self._configuration.executor.store
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
                adapted = republish.adapt_to_delayed_delivery(task.app, request, options)
                signature = task.signature_from_request(
                    request, request.args, request.kwargs, **adapted
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
        self._request.idempotency_end_logged = True

    def ignore(self) -> NoReturn:
        """Acknowledges the message; its task id gets no state."""
        self._request.idempotency_end_logged = True
        raise Ignore

    def reject(self, reason: str) -> NoReturn:
        """Rejects the message without requeueing it, for the broker's dead-letter queue."""
        self._request.idempotency_end_logged = True
        raise Reject(reason, requeue=False)


def acknowledged(task: Task, after: str) -> bool:
    """Returns whether a message of `task` is acknowledged after a ``failure`` or ``timeout``."""
    either = task.acks_on_failure_or_timeout
    acks = getattr(task, f"acks_on_{after}", either)  # one option for both before Celery 5.7
    return not task.acks_late or bool(acks)


@lru_cache(16)
def worker_name(nodename: str | None, pid: int) -> str:
    """Returns ``nodename/pid``, the name of a process that runs executions."""
    return f"{nodename or gethostname()}/{pid}"


def _is_to_be_logged(record: logging.LogRecord) -> bool:
    data = getattr(record, "data", None)
    if not isinstance(data, dict) or data.get("description") not in ("ignored", "rejected"):
        return True
    task = get_current_task()
    request = task.request_stack.top if task is not None else None
    return not getattr(request, "idempotency_end_logged", False)


# The logger of the tracer, by its name in every version of Celery.
logging.getLogger("celery.app.trace").addFilter(_is_to_be_logged)
