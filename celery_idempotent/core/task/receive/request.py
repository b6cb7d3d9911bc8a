"""A message of an idempotent task in the worker's main process.

There Celery receives messages, sends them to the pool, and receives their ends. This class of
requests does what a dead or discarded message can no longer do itself: it ends leases and
reservations.
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any
from weakref import ref

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery import Task
from celery.exceptions import Ignore, InvalidTaskError, Reject
from celery.platforms import signals
from celery.utils.functional import maybe_list
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks
from celery.worker.state import revoked_stamps
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.utils.imports import symbol_by_name

from celery_idempotent.core import shared_counters, worker
from celery_idempotent.core.configuration.configuration import ConfigurationError, TaskConfiguration
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import CallIdentity, log_extra, report
from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import State, layout
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.task.message import continuation, message_headers
from celery_idempotent.core.task.message.eta import seconds_until
from celery_idempotent.core.task.message.key_resolution import resolve_key
from celery_idempotent.core.task.message.message_headers import MessageHeaders, Waits
from celery_idempotent.core.task.publish.message_copy import CONTENT_TYPE, was_put_back
from celery_idempotent.core.task.receive import reservations
from celery_idempotent.core.task.receive.celery_log import comes_back
from celery_idempotent.core.task.receive.host import PUT_BACK, acknowledged, worker_name
from celery_idempotent.errors import IdempotencyError

#: Seconds that Celery may take to kill a pool process after `on_timeout`; until then, its lease
#: stays.
KILL_GRACE = 1.0

logger = logging.getLogger(__name__)

#: Attributes in which this package keeps the state of a call in its request. A header of such a
#: name is removed, because Celery makes an attribute of any header.
_STATE = frozenset(
    {"_protected"}
    | {f"idempotency_{name}" for name in ("host", "end_logged", "headers_again")}
    | {f"idempotency_{name}" for name in ("soft_limit", "without_body")}
)

#: The signal that gives a process no time to release its key; None on Windows, which has none.
_SIGKILL = getattr(signal, "SIGKILL", None)

#: Names of the tasks of which this worker has logged a message without a decision.
_bypassed: set[str] = set()
#: Receives each new request; `redelivery` sets it, and reads it. None where it renews no messages.
received: deque[ref[IdempotentRequest]] | None = None
#: Called in place of the timer for each message with an ETA; `waking` sets it. None where it wakes
#: none.
schedule: Callable[..., Any] | None = None


class IdempotentRequest(Request):
    """Ends the lease of a dead pool process, and the reservation of a discarded message.

    Thus the redelivered message runs at once, and the next call with the key is published at once.
    """

    #: Whether a copy of the message, or the message itself, is in the queue again.
    _comes_back = False

    def __init__(self, *args: Any, **options: Any) -> None:
        """Passes the content type to the pool, which Celery does only for AMQP messages."""
        super().__init__(*args, **options)
        for name in _STATE & self.request_dict.keys():
            del self.request_dict[name]
        self._received_ms = shared_counters.now_ms()
        if received is not None:
            received.append(ref(self))
        if self.content_type:
            properties = self.request_dict.get("properties") or {}
            self.request_dict["properties"] = {**properties, CONTENT_TYPE: self.content_type}

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes ``on_success`` of a subclass call what the end of a message needs here.

        Celery derives a class from this one, and its ``on_success`` does not call ``super()``.
        """
        super().__init_subclass__(**options)
        end = vars(cls).get("on_success")
        if end is not None:

            def on_success(self: Any, result: tuple[Any, ...], **options: Any) -> Any:
                self.check_decided(failed=result[0])
                try:
                    return end(self, result, **options)
                finally:
                    self.give_back_if_unbegun()

            cls.on_success = on_success

    def check_decided(self, *, failed: Any) -> None:
        """Reports a message that has succeeded although it has not reached its task's ``__call__``.

        Not one that has failed: Celery has many reasons to fail a message before it calls the task.
        """
        counters = worker.counters
        if failed or counters is None or counters.has_entered(self.id, self._received_ms):
            return
        if self.worker_pid is not None and not counters.has_process(self.worker_pid):
            return
        if self.app.conf.worker_deduplicate_successful_tasks and self.delivery_info["redelivered"]:
            return
        event = table.BYPASSED_AGAIN if self.name in _bypassed else table.BYPASSED
        _bypassed.add(self.name)
        report(event, CallIdentity(self.task, self.name, message_headers.id_text(self.id)))

    def revoked(self) -> bool:
        """Returns whether to discard the message: not if its execution has begun or finished.

        If Celery discarded a copy of such a message, it would overwrite the state of the execution,
        count it as failed in its chord, and acknowledge the copy, which may be the last one if the
        execution dies. The flow puts the copy back instead, or replays the outcome.
        """
        if not self._configuration.in_shadow and self._has_begun():
            return False
        revoked: bool = super().revoked()
        if revoked:
            self._give_back(discarded=True)
        return revoked

    def _give_back(self, *, discarded: bool = False) -> None:
        """Ends the reservation of this message, if it may have one.

        Args:
            discarded: whether it will never run, so that a reservation for it as a retry ends, too.
        """
        if not (discarded or self._configuration.settings.deduplicates):
            return
        with _warning("Cannot end the reservation of task %s; it will expire: %s", self.id):
            key, generation = self.key_and_generation
            if key is not None:
                last = generation if discarded else None
                reservations.give_back(self._store, key, self.text_id, last)

    def give_back_if_unbegun(self) -> None:
        """Ends the reservation of this message if it may have ended without having begun."""
        counters = worker.counters
        if not self._comes_back and counters and counters.unbegun_since(self.time_start or 0.0):
            self._give_back()

    def _has_begun(self) -> bool:
        """Returns whether the message is expired or revoked, but its execution has begun before.

        A message whose execution began in time no longer expires, even if that dies and runs again,
        or is retried. A revoked one counts as begun only while it runs or has an outcome.
        """
        revoked = self.id in revoked_tasks or self._has_revoked_stamp()
        if not revoked and (self.expires is None or seconds_until(self.expires)):
            return False
        with _warning(
            "Cannot read the record of task %s, which has expired or was revoked: it is discarded, "
            "even if a copy of it is running: %s",
            self.id,
        ):
            return self._has_begun_by_record(revoked)
        return False

    def _has_begun_by_record(self, revoked: bool) -> bool:
        """See `_has_begun`, for the record of the key."""
        key, generation = self.key_and_generation
        store = self._store
        stored = None if key is None else run_sync(store.read(key))
        if key is None or stored is None:
            return False
        record = store.record(key, stored.raw)
        if record.state.finished:
            # The outcome is that of this message, or was replayed for an earlier copy of it.
            reference = store.reference(self.text_id)
            return record.task_id == self.text_id or bool(reference and reference.replayed)
        if record.task_id != self.text_id:
            return False
        if record.state is State.STARTED:
            return not revoked or record.at_ms > store.now_ms()
        # The key is reserved. If for a message of a higher generation, this one has begun before.
        return not revoked and record.awaited > generation

    def _has_revoked_stamp(self) -> bool:
        """Returns whether a stamp of the message was revoked (``revoke_by_stamped_headers``)."""
        return any(
            value in maybe_list(revoked_stamps[stamp])
            for stamp, values in self.stamps.items()
            if stamp in revoked_stamps
            for value in maybe_list(values) or ()
        )

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """Ends the lease of a lost pool process before Celery requeues its message."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, (Ignore, Reject)):
            self._comes_back = error.args == (PUT_BACK,) or getattr(error, "requeue", False)
        is_lost = isinstance(error, WorkerLostError)
        ends_child = is_lost or isinstance(error, (Terminated, SystemExit, KeyboardInterrupt))
        if return_ok or not ends_child:
            if ends_child and not self._configuration.in_shadow:
                # The process is alive: it has replayed this error as a stored outcome. It has also
                # sent the continuation, which Celery would send again here.
                continuation.drop_continuation(self._context)
            return super().on_failure(exc_info, send_failed_event, return_ok)
        redelivered = is_lost and self._is_redelivered()
        case = self._abandon(0.0, layout.PROCESS_LOST if is_lost else layout.TERMINATED)
        if redelivered and case == "sending" and not self.acknowledged:
            # The process died between the result and the continuation. Celery 5.7 would acknowledge
            # the message, because the result is stored, and its chord would never complete.
            return self.reject(requeue=True)
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Ends the lease of a process that SIGKILL keeps from releasing its key."""
        super().terminate(pool, signal)
        if self.time_start and signals.signum(signal or TERM_SIGNAME) == _SIGKILL:
            self._abandon(0.0, layout.TERMINATED)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Makes the lease of a process at its hard time limit end shortly after the process."""
        if not soft and self._abandon(KILL_GRACE, layout.HARD_TIME_LIMIT) != "ok":
            self._give_back()
        return super().on_timeout(soft, timeout)

    @property
    def _configuration(self) -> TaskConfiguration:
        configuration: TaskConfiguration = self.task.idempotency_configuration
        return configuration

    @property
    def _store(self) -> RecordStore:
        return self._configuration.executor.store

    @property
    def text_id(self) -> str:
        """The id of the message, as in its record."""
        return message_headers.id_text(self.id)

    @property
    def waits(self) -> Waits | None:
        """What the message waits for; None unless it was put back because of a conflict."""
        with suppress(IdempotencyError):
            return MessageHeaders.read(self.name, self.text_id, self._context.headers).waits
        return None

    @cached_property
    def key_and_generation(self) -> tuple[Key | None, int]:
        """The key of the message's record (None if it is not protected), and its generation.

        Raises:
            KeyRuleError: if the rule cannot derive a key from the arguments.
        """
        configuration, context = self._configuration, self._context
        key, _ = resolve_key(
            configuration, self.text_id, context.headers, self.args, self.kwargs, request=context
        )
        if key is None:
            return None, 0
        return configuration.record_key(key, self.text_id), continuation.generation_of(context)

    def _is_redelivered(self) -> bool:
        """Returns whether the message of a lost worker process is redelivered or retried."""
        task = self.task
        return (
            (task.acks_late and task.reject_on_worker_lost)
            or getattr(task, "retry_on_worker_lost", False)  # since Celery 5.7
            or not acknowledged(task, "failure")
        )

    def _abandon(self, grace: float, reason: str) -> str:
        """Ends the lease of the pool process after `grace` seconds.

        Args:
            reason: how the execution ends: `Record.ended_by`.

        Returns:
            The reply of the script; empty without one.
        """
        with _warning(
            "Cannot end the lease of task %s, whose worker process died; it will expire: %s",
            self.id,
        ):
            key, _ = self.key_and_generation
            if key is None or self.worker_pid is None:
                return ""
            worker = worker_name(self.hostname, self.worker_pid)
            grace_ms = round(grace * 1000)
            abandon = commands.abandon(key, self.text_id, worker, grace_ms=grace_ms, reason=reason)
            case = self._configuration.execute(abandon).case
            if case == "ok":
                call = CallIdentity(self.task, self.name, self.text_id, key)
                report(table.ABANDONED, call, reason=reason, grace=grace)
            return case
        return ""  # after an error; the lease expires by itself, and the message is redelivered


@contextmanager
def _warning(message: str, task_id: str) -> Iterator[None]:
    """Logs an error of the block instead of raising it: the worker must survive it.

    Args:
        message: a format of the task id and the error.
    """
    try:
        yield
    except Exception as error:
        logger.warning(message, one_line(task_id), error, extra=log_extra(None, task_id=task_id))


def ending_unreadable(task: Task, receive: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `receive`, which also ends the reservation of a message that it cannot read.

    Celery drops such a message without a result.
    """

    def receive_readable(message: Any, *args: Any, **kwargs: Any) -> Any:
        headers = message.headers or {}
        reset = comes_back.set(was_put_back(task.name, headers))
        try:
            return receive(message, *args, **kwargs)
        except (ContentDisallowed, DecodeError, InvalidTaskError):
            task_id = message_headers.id_text(headers.get("id"))
            with _warning(
                "Cannot end the reservation of task %s, whose message cannot be read; it will "
                "expire: %s",
                task_id,
            ):
                key = MessageHeaders.read(task.name, task_id, headers).key
                if key is not None:
                    configuration: TaskConfiguration = task.idempotency_configuration
                    own_key = configuration.record_key(key, task_id)
                    reservations.give_back(configuration.executor.store, own_key, task_id)
            raise
        finally:
            comes_back.reset(reset)

    return receive_readable


@contextmanager
def scheduling(consumer: Any) -> Iterator[None]:
    """Makes the message handler that Celery creates in the block pass ETAs to :data:`schedule`.

    The handler keeps a reference to the ``call_at`` that the timer has in the block.
    """
    timer = consumer.timer
    call_at = timer.call_at

    def schedule_at(eta: Any, function: Any, args: Any = (), *rest: Any, **options: Any) -> Any:
        if schedule is None:
            return call_at(eta, function, args, *rest, **options)
        return schedule(consumer, partial(call_at, eta), function, args, *rest, **options)

    timer.call_at = schedule_at
    try:
        yield
    finally:
        timer.call_at = call_at


def request_class(task: Task) -> type[IdempotentRequest]:
    """Returns the request class of `task`: this package's, derived from the task's own.

    Raises:
        ConfigurationError: if the task's own is not a subclass of Celery's.
    """
    own = symbol_by_name(task.Request)
    if not (isinstance(own, type) and issubclass(own, Request)):
        raise ConfigurationError(
            f"{task.name}: its Request, {getattr(own, '__name__', own)}, is not a subclass of "
            "celery.worker.request.Request: derive it from that class"
        )
    if issubclass(IdempotentRequest, own):
        return IdempotentRequest
    if issubclass(own, IdempotentRequest):
        return own
    return type(own.__name__, (IdempotentRequest, own), {"__module__": own.__module__})
