"""A task's call at the gate: what the gate asks, in Celery's words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.states import FAILURE, SUCCESS
from celery.utils.nodenames import gethostname

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.executor.call import Delegate, Disposition, Fail, Release
from celery_idempotent.executor.execution import Execution
from celery_idempotent.executor.soft_limit import SoftLimit
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.settings import Settings
from celery_idempotent.task import canvas, current_call, message_headers, republish
from celery_idempotent.task.message_headers import MessageHeaders
from celery_idempotent.task.requeue import RequeuePause, hold_for, longest_wait

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_idempotent.task.task import IdempotentTask


#: More retries than any message of one task id has.
GENERATIONS = 10**9


class TaskCall:
    """One message of a task, in the worker that received it."""

    @staticmethod
    def of(request: Context | None) -> TaskCall | None:
        """The call that stands at the gate, or has passed it, under `request`."""
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
        self.key = key
        self.settings = settings
        self.unanswered_ids = headers.unanswered_ids
        self.requeue_count = headers.requeue_count
        self.generation = generation_of(request)
        self.own_outcome = False
        self.rescheduled: Release | None = None
        #: The task has replaced itself: its id, and what follows it, belong to another.
        self.replaced: Delegate | None = None
        #: Something follows the task. Told now: older Celerys empty `request.chain` in sending it.
        self.continues = canvas.has_continuation(request)
        self.execution: Execution | None = None
        self._request = request
        self.began_at = monotonic()
        self._args = args
        self._kwargs = kwargs

    @property
    def soft_limit(self) -> SoftLimit | None:
        """The message's; an eager call is under the limit of another message, if of any."""
        return None if self._request.is_eager else current_call.soft_limit_of(self._request)

    @property
    def wait_timeout(self) -> float:
        """What is configured, but no time limit is reached by waiting."""
        return min(self.settings.wait_timeout, current_call.wait_within_time_limits(self._request))

    def run(self, execution: Execution) -> Any:
        """Run the task's body, ``autoretry_for`` and the like included."""
        self.execution = execution
        self._request.idempotency_call = self
        self._request.idempotency_without_body = False
        self.sender.before_start(self.task_id, self._args, self._kwargs)
        return self.sender.run(*self._args, **self._kwargs)

    @property
    def stopped(self) -> bool:
        """Whether the body has dropped the rest of its chain, and whatever else was to follow."""
        return self.continues and not canvas.continues_on_success(self._request)

    def disposition(self, error: BaseException) -> Disposition:
        """Celery's retry holds the key for its task id; ``idempotency_replay_errors`` end it."""
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
        """Whether Celery stores `error` as the task's, and acknowledges the message."""
        stored = isinstance(error, Exception) and not isinstance(error, MemoryError)
        return stored and not self._request.is_eager and acknowledged(self.sender, "failure")

    def replaced_by_canvas(self, reports_result: bool) -> None:
        """What has taken the task's place is on its way."""
        self.replaced = Delegate((self.generation // GENERATIONS + 1) * GENERATIONS, reports_result)

    def retry_published(self, retry: Retry) -> None:
        """The message of `retry` is on its way: the key waits for it, however this run ends."""
        held = self._until(_options_of(retry), self.generation + 1)
        if self.rescheduled is None or held.hold > self.rescheduled.hold:
            self.rescheduled = held

    def _until(self, options: Mapping[str, Any], awaited: int) -> Release:
        return Release(hold=hold_for(options, self.settings.lease), awaited=awaited)

    def recover_result(self, record: Record, error: IdempotencyError) -> Any:
        """For a redelivery of the message that ran: what the result backend has under its id.

        Another failure must not be told to those who have seen the success, or the first failure.
        """
        if record.task_id == self.task_id and not self._request.is_eager:
            result = self.sender.AsyncResult(self.task_id)
            try:
                state, value = result.state, result.result
            except Exception as trouble:
                raise error from trouble
            if state == SUCCESS:
                return value
            if state == FAILURE and isinstance(value, Exception):
                raise value
        raise error

    def replayed(self, record: Record) -> None:
        """A redelivery of the message that ran sends its continuation only if nobody has yet.

        Another task id is a caller of its own: its continuation is its own, too.
        """
        self._request.idempotency_call = self
        self._request.idempotency_without_body = True
        self.own_outcome = record.task_id == self.task_id
        if self.own_outcome and record.continuation_sent:
            self.own_outcome = False
            canvas.drop_continuation(self._request)

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        """Publish the message again under its id, then let this copy be acknowledged.

        In this order, because the broker may take an acknowledgement of a copy for one of the
        original. Where publishing fails, the broker is asked to hand this copy out again; where it
        cannot be asked either, it will do so by itself.
        """
        if self._request.is_eager:
            raise reason
        headers = message_headers.with_derived_key(
            self._request.headers, self.key, self.task_id, self.requeue_count + 1, unanswered_ids
        )
        self.publish_again(self.sender, seconds, headers, reason)

    def publish_again(
        self, task: Task, seconds: float, headers: dict[str, Any] | None, reason: BaseException
    ) -> NoReturn:
        """Publish the message of `task`, then let this copy be acknowledged.

        It keeps its time of expiry, in a header alone: a worker knows what has begun in time, and a
        broker, which Celery would tell it too, drops whatever it has.
        """
        request = self._request
        expires = request.expires
        if expires and task.app.conf.task_protocol == 2:
            headers, expires = {**(headers or {}), "expires": expires}, None
        pause = RequeuePause(task, request, self.began_at)
        options = {
            "countdown": min(seconds, longest_wait(task.app)),
            "retries": request.retries,
            "headers": headers,
            "expires": expires,
            "add_to_parent": False,
        }
        while True:
            try:
                message = task.signature_from_request(
                    request,
                    request.args,
                    request.kwargs,
                    **republish.adapt_to_delayed_delivery(task.app, request.delivery_info, options),
                )
                if task is not self.sender:
                    republish.copy_properties(message, request, options)
                with republish.confirming_producer(task.app) as producer:
                    message.apply_async(producer=producer)
                break
            except Exception as error:
                if not pause.wait(error):
                    # The errors behind this one would be a page of log for each.
                    failure = f"{reason}; and it cannot be published: {error}"
                    raise Reject(failure, requeue=True) from None
        raise Ignore from reason

    def ignore(self) -> NoReturn:
        """Acknowledge the message; its task id never gets a state."""
        raise Ignore

    def reject(self, reason: str) -> NoReturn:
        """Reject the message without requeueing it: the broker's dead letters get it."""
        raise Reject(reason, requeue=False)


def _options_of(retry: Retry) -> Mapping[str, Any]:
    """The options that the message of `retry` is published with, as far as they are known."""
    options: Mapping[str, Any] = retry.sig.options if retry.sig else {"eta": retry.when}
    return options


def generation_of(request: Any) -> int:
    """The number of a message among those of its task id.

    A retry adds one to ``retries``; a task that replaces itself starts again, one level deeper.
    """
    depth = getattr(request, "replaced_task_nesting", 0) or 0
    return int(depth) * GENERATIONS + int(request.retries or 0)


def acknowledged(task: Task, after: str) -> bool:
    """Whether a message of `task` is acknowledged after a ``failure``, or a ``timeout``."""
    either = task.acks_on_failure_or_timeout
    acks = getattr(task, f"acks_on_{after}", either)  # one option for both before Celery 5.7
    return not task.acks_late or bool(acks)


@lru_cache(16)
def worker_name(nodename: str | None, pid: int) -> str:
    """``nodename/pid``: the process that runs an execution."""
    return f"{nodename or gethostname()}/{pid}"
