"""A kombu consumer that handles each message once, even if the broker delivers it repeatedly.

A handled message is acknowledged after its key has completed. By default, a message whose key is
held, or whose handler has failed, is delayed: it stays unacknowledged in this consumer, like a
Celery message with a countdown, and is retried after a growing delay. If the consumer dies, the
broker redelivers the message. Delayed messages count against `prefetch_count`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kombu.asynchronous.timer import Timer
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.message import Message
from kombu.messaging import Producer
from kombu.mixins import ConsumerMixin

from celery_idempotent import errors
from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.conflict import POLICIES, put_back_delay
from celery_idempotent.core.flow.execution import BaseExecution
from celery_idempotent.core.flow.flow import execute
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.thread import run_flow
from celery_idempotent.core.flow.values import Answer, Drop, Failure, PutBack, Reject, Result
from celery_idempotent.core.record import Record, State, layout
from celery_idempotent.functions.direct_call import (
    DirectHost,
    direct_call,
    extensions_of_direct_call,
)

if TYPE_CHECKING:
    from celery_idempotent.functions.engine import Idempotency

logger = logging.getLogger(__name__)

KEY_HEADER = "idempotency-key"
#: The header of a dead-lettered message that has the reason.
REASON_HEADER = "idempotency-reason"

_POLICIES = {
    "on_conflict": tuple(name for name, policy in POLICIES.items() if policy.consumers),
    "on_error": ("retry", "ignore", "reject"),
    "on_store_error": ("retry", "run"),
}

KeyOf = Callable[[Any, Message], Any]


def header_or_message_id(body: Any, message: Message) -> Any:
    """Returns the header ``idempotency-key`` or, without one, the property ``message_id``."""
    key = (message.headers or {}).get(KEY_HEADER)
    return message.properties.get("message_id") if key is None else key


class IdempotentConsumer(ConsumerMixin):
    """Calls `handler` once for each key among the messages of `queues`. Start it with :meth:`run`.

    Args:
        idem: the engine that stores the records; its ``lease``, ``result_ttl``, ``replay_errors``
            and ``max_attempts`` apply to messages too.
        connection: the connection to the broker.
        queues: the queues to consume from.
        handler: called with the body and the message; its return value is not stored.
        key: returns the key of a body and its message.
        on_conflict: applies to a message whose key is held by another message: ``retry`` it later,
            ``ignore`` it (acknowledge), or ``reject`` it (dead-letter). A redelivery of the running
            message itself is always retried, because it may have to take over.
        on_error: applies to a message whose handler has failed: ``retry`` it later, up to
            ``max_attempts`` in all, then dead-letter it; ``reject`` it at once; or ``ignore`` it.
            An error among ``replay_errors`` is final and never retried.
        on_store_error: ``retry`` the message later, or ``run`` it without protection.
        dead_letter_queue: the queue for messages that cannot be handled. If None, they are rejected
            and left to the broker; a Redis broker drops them.
        prefetch_count: messages that this consumer holds at once, delayed ones included.
        accept: content types to decode.

    Raises:
        SettingsError: for the first invalid option, in one line.
    """

    def __init__(
        self,
        idem: Idempotency,
        connection: Connection,
        queues: Sequence[Queue],
        handler: Callable[[Any, Message], Any],
        *,
        key: KeyOf = header_or_message_id,
        on_conflict: str = "retry",
        on_error: str = "retry",
        on_store_error: str = "retry",
        dead_letter_queue: Queue | None = None,
        prefetch_count: int = 10,
        accept: Sequence[str] = ("json",),
    ) -> None:
        values = on_conflict, on_error, on_store_error
        for value, (name, choices) in zip(values, _POLICIES.items(), strict=True):
            if value not in choices:
                named = ", ".join(map(repr, choices))
                raise errors.SettingsError(f"IdempotentConsumer: {name} must be one of {named}")
        self.connection = connection
        self.dead_letter_queue = dead_letter_queue
        self.on_error = on_error
        self._idem = idem
        self._queues = queues
        self._handler = handler
        self._key = key
        self._prefetch_count = prefetch_count
        self._accept = list(accept)
        self._settings = replace(
            idem.settings,
            on_conflict=on_conflict,
            on_store_error=on_store_error,
            store_result=False,
            wait_timeout=0.0,
        )
        #: Holds the messages that this consumer has not acknowledged yet, and handles each when it
        #: is due.
        self._timer = Timer()

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        """Returns one consumer for all queues."""
        self._timer.clear()  # the broker redelivers the messages of an earlier connection
        return [
            consumer(
                list(self._queues),
                callbacks=[self._receive],
                accept=self._accept,
                prefetch_count=self._prefetch_count,
            )
        ]

    def on_iteration(self) -> None:
        """Handles new messages, and delayed ones that are due."""
        entries = iter(self._timer)
        while not self.should_stop and (due := next(entries)[1]) is not None:
            due()

    def on_decode_error(self, message: Message, exc: Exception) -> None:
        """Dead-letters a message that cannot be decoded."""
        self._dead_letter(message, f"its body cannot be decoded: {type(exc).__name__}")

    def _receive(self, body: Any, message: Message) -> None:
        # `on_iteration` handles it, not this callback: while a handler waits for the broker, such
        # as for a confirmed publish, this is called for further messages, and nested handlers would
        # overflow the stack.
        self._timer.call_after(0, self._handle, [_Delivery(body, message)])

    def _handle(self, delivery: _Delivery) -> None:
        """Executes a delivery; its message is then acknowledged, delayed or dead-lettered."""
        body, message = delivery.body, delivery.message
        try:
            data = delivery.data = delivery.data or self._data_of(body, message)
        except errors.IdempotencyError as reason:
            self._dead_letter(message, str(reason))
            return
        host = _MessageHost(data, partial(self._handler, body, message), self._idem.app)
        executor = self._idem.executor
        try:
            extensions = extensions_of_direct_call(self._settings)
            call = Call(data, host, executor.runtime, executor.codec, extensions)
            end = run_flow(partial(execute, call))
        except Exception as error:
            end = Answer(Failure(error))
        if isinstance(end, PutBack):
            self._delay(delivery, end.seconds, rollback_count=end.rollback_count)
        elif isinstance(end, Reject):
            self._dead_letter(message, end.reason)
        elif isinstance(end, Drop) or isinstance(end.outcome, Result):
            message.ack()
        elif not isinstance(end.outcome.error, Exception):
            raise end.outcome.error
        elif end.outcome.error is host.error:
            self._handle_failure(delivery, end.outcome.error, final=end.is_own)
        elif end.record is not None and end.replayed and _has_outcome(end.record):
            message.ack()  # the key has an outcome, even if it cannot be replayed
        elif isinstance(end.outcome.error, _UNUSABLE):
            self._dead_letter(message, str(end.outcome.error))
        else:
            self._handle_failure(delivery, end.outcome.error, final=False)

    def _data_of(self, body: Any, message: Message) -> CallData:
        try:
            value = self._key(body, message)
        except errors.KeyRuleError:
            raise
        except Exception as error:
            # Only its type is shown, since its text may quote the body.
            raise errors.KeyRuleError(
                f"IdempotentConsumer: key raised {type(error).__name__} for a message; it must "
                "return a key for every message"
            ) from error
        key = self._idem.key_of(value, [message.content_type, message.body])
        # Without a message id, every message with the same key counts as a redelivery.
        task_id = str(message.properties.get("message_id") or key.digest)
        layout.write_task_id(task_id)  # refuses an id that no record can hold
        return direct_call(self._idem, key, self._settings, task_id=task_id)

    def _delay(self, delivery: _Delivery, seconds: float, **changes: Any) -> None:
        number = delivery.data.put_back_count + 1
        delivery.data = delivery.data._replace(put_back_count=number, **changes)
        self._timer.call_after(seconds, self._handle, [delivery])

    def _handle_failure(self, delivery: _Delivery, error: Exception, *, final: bool) -> None:
        delivery.failures += 1
        retries_left = delivery.failures < self._settings.max_attempts and not final
        extra = _fields(delivery.message)
        if self.on_error == "retry" and retries_left:
            delay = put_back_delay(delivery.failures - 1, self._settings.lease)
            logger.warning(
                "A handler failed; retrying in %.1f s", delay, exc_info=error, extra=extra
            )
            self._delay(delivery, delay)
        elif self.on_error == "ignore":
            logger.warning("A handler failed; ignoring the message", exc_info=error, extra=extra)
            delivery.message.ack()
        else:
            self._dead_letter(delivery.message, f"its handler raised {type(error).__name__}")

    def _dead_letter(self, message: Message, reason: str) -> None:
        logger.error("Dead-lettering a message: %s", reason, extra=_fields(message))
        if self.dead_letter_queue is None:
            message.reject()
            return
        Producer(message.channel).publish(
            message.body,
            exchange=self.dead_letter_queue.exchange,
            routing_key=self.dead_letter_queue.routing_key or self.dead_letter_queue.name,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers={**message.headers, REASON_HEADER: reason},
            declare=[self.dead_letter_queue],
            delivery_mode=2,
        )
        message.ack()


def _fields(message: Message) -> dict[str, Any]:
    return log_extra(None, task_id=message.properties.get("message_id"))


@dataclass
class _Delivery:
    """One unacknowledged message."""

    body: Any
    message: Message
    #: Its `CallData`, made when it is first handled, and changed for each retry; None before.
    data: Any = None
    #: How often its handler has failed.
    failures: int = 0


class _MessageHost(DirectHost):
    #: The error that the handler raised; `run` sets it. None if it did not run, or raised none.
    error: BaseException | None = None

    def run(self, execution: BaseExecution) -> Any:
        try:
            return super().run(execution)
        except BaseException as error:
            self.error = error
            raise

    def recover_result(self, record: Record, error: errors.IdempotencyError) -> None:
        """Returns None: a message does not need the value."""


def _has_outcome(record: Record) -> bool:
    """Returns whether a handler has ended; a poisoned record has no handler's error."""
    return record.state is not State.FAILED or bool(record.format)


#: Errors of messages that can never be handled.
_UNUSABLE = (errors.KeyReusedError, errors.CorruptRecordError, errors.PoisonedTaskError)
