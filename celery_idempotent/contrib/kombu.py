"""A kombu consumer behind the gate: each message is handled once, whoever gets its copies.

A message is acknowledged when its key has completed, never before. One that meets a conflict, or
whose handler has failed, is set aside: it stays unacknowledged in this consumer and is tried again
after a delay that grows, as Celery does with a countdown. So nothing spins, and if this consumer
dies meanwhile, the broker gives the message to another. What is set aside counts against
`prefetch_count`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from kombu.connection import Connection
from kombu.entity import Queue
from kombu.message import Message
from kombu.messaging import Producer
from kombu.mixins import ConsumerMixin

from celery_idempotent.errors import (
    CorruptRecordError,
    IdempotencyError,
    KeyReusedError,
    KeyRuleError,
    PoisonedTaskError,
    SettingsError,
)
from celery_idempotent.executor.conflict import requeue_delay
from celery_idempotent.executor.execution import BaseExecution
from celery_idempotent.functions.call import DirectCall, current_execution
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record
from celery_idempotent.settings import Settings

if TYPE_CHECKING:
    from celery_idempotent.functions.engine import Idempotency

logger = logging.getLogger(__name__)

KEY_HEADER = "idempotency-key"
#: In a dead letter: why it is one.
REASON_HEADER = "idempotency-reason"

_CHOICES = {
    "on_conflict": ("retry", "ignore", "reject"),
    "on_error": ("retry", "ignore", "reject"),
    "on_store_error": ("retry", "run"),
}

KeyOf = Callable[[Any, Message], Any]


def header_or_message_id(body: Any, message: Message) -> Any:
    """The key in the header ``idempotency-key``, else the property ``message_id``."""
    return message.headers.get(KEY_HEADER) or message.properties.get("message_id")


class IdempotentConsumer(ConsumerMixin):
    """Gives each message of `queues` to `handle`, once for each key. Run it with :meth:`run`.

    Args:
        idem: where the records are; its ``lease``, ``result_ttl``, ``replay_errors`` and
            ``max_attempts`` go for messages, too.
        connection: to the broker.
        queues: to consume from.
        handle: called with body and message. What it returns is not kept.
        key: gives the key of a body and its message.
        on_conflict: what a message does whose key another one has: ``retry`` later, ``ignore`` it
            (acknowledge), or ``reject`` it to the dead letters. A copy of the very message that
            runs always tries again later: it may have to take over.
        on_error: what a message does whose handler has failed: ``retry`` later, up to
            ``max_attempts`` in all, then the dead letters; ``reject`` at once; or ``ignore``.
            An error among ``replay_errors`` is final, and never tried again.
        on_store_error: ``retry`` later, or ``run`` without protection.
        dead_letter_queue: a queue for what cannot be handled. None: the message is rejected,
            where the broker puts such; a Redis drops it.
        prefetch_count: messages that this consumer has at once, those set aside included.
        accept: content types that are decoded.

    Raises:
        SettingsError: for the first option that is wrong, in one line.
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
        policies = {
            "on_conflict": on_conflict,
            "on_error": on_error,
            "on_store_error": on_store_error,
        }
        for name, value in policies.items():
            if value not in _CHOICES[name]:
                choices = ", ".join(map(repr, _CHOICES[name]))
                raise SettingsError(f"IdempotentConsumer: {name} must be one of {choices}")
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
            on_lease_lost="finish",
            store_result=False,
        )
        self._waiting: list[_Delivery] = []
        self._number = itertools.count()

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        """One for all queues. What came by an earlier connection is the broker's again."""
        self._waiting.clear()
        return [
            consumer(
                list(self._queues),
                callbacks=[self._receive],
                accept=self._accept,
                prefetch_count=self._prefetch_count,
            )
        ]

    def on_iteration(self) -> None:
        """Handle what has come, and what was set aside and is due."""
        while self._waiting and self._waiting[0].due <= monotonic() and not self.should_stop:
            self._pass(heapq.heappop(self._waiting))

    def on_decode_error(self, message: Message, exc: Exception) -> None:
        """What cannot be read goes to the dead letters."""
        self._dead_letter(message, f"its body cannot be decoded: {type(exc).__name__}")

    def _receive(self, body: Any, message: Message) -> None:
        # Handled in between: whoever waits for the broker, as a publisher that wants a confirmation
        # does, receives the next message meanwhile, and handlers would pile up on the stack.
        delivery = _Delivery(monotonic(), next(self._number), body, message)
        heapq.heappush(self._waiting, delivery)

    def _pass(self, delivery: _Delivery) -> None:
        """Through the gate, and then acknowledged, set aside or buried."""
        message = delivery.message
        try:
            call = self._call(delivery)
            self._idem.executor.enter(call)
        except _ComeBackError as later:
            delivery.unanswered_ids = later.unanswered_ids
            self._delay(delivery, later.seconds)
        except _IgnoredError:
            message.ack()
        except _RejectedError as reason:
            self._dead_letter(message, str(reason))
        except (KeyRuleError, KeyReusedError, CorruptRecordError, PoisonedTaskError) as refusal:
            self._dead_letter(message, str(refusal))
        except Exception as error:
            if call.was_replayed:
                message.ack()  # the first one's end is known; a value was not asked for
            else:
                self._failed(delivery, error, final=call.own_outcome)
        else:
            message.ack()

    def _call(self, delivery: _Delivery) -> _MessageCall:
        message = delivery.message
        try:
            key = self._idem.key_of(
                self._key(delivery.body, message), [message.content_type, message.body]
            )
        except KeyRuleError:
            raise
        except Exception as error:
            # Not its message: that may quote the body.
            raise KeyRuleError(f"the key of a message raised {type(error).__name__}") from error
        return _MessageCall(self._idem, key, self._settings, delivery, self._handler)

    def _delay(self, delivery: _Delivery, seconds: float) -> None:
        delivery.requeue_count += 1
        delivery.due = monotonic() + seconds
        heapq.heappush(self._waiting, delivery)

    def _failed(self, delivery: _Delivery, error: Exception, *, final: bool) -> None:
        delivery.failures += 1
        again = delivery.failures < self._settings.max_attempts and not final
        if self.on_error == "retry" and again:
            seconds = requeue_delay(delivery.failures - 1, self._settings.lease)
            logger.warning(
                "A message has failed, and is tried again in %.1f s", seconds, exc_info=error
            )
            self._delay(delivery, seconds)
        elif self.on_error == "ignore":
            logger.warning("A message has failed, and is ignored", exc_info=error)
            delivery.message.ack()
        else:
            self._dead_letter(delivery.message, f"its handler raised {type(error).__name__}")

    def _dead_letter(self, message: Message, reason: str) -> None:
        logger.error("A message goes to the dead letters: %s", reason)
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


@dataclass(order=True)
class _Delivery:
    """One message in this consumer's hands."""

    due: float
    number: int
    body: Any = field(compare=False)
    message: Message = field(compare=False)
    requeue_count: int = field(default=0, compare=False)
    failures: int = field(default=0, compare=False)
    unanswered_ids: bytes = field(default=b"", compare=False)


class _MessageCall(DirectCall):
    def __init__(
        self,
        sender: Any,
        key: Key,
        settings: Settings,
        delivery: _Delivery,
        handler: Callable[[Any, Message], Any],
    ) -> None:
        super().__init__(sender, key, settings)
        self.unanswered_ids = delivery.unanswered_ids
        self.requeue_count = delivery.requeue_count
        self.was_replayed = False
        # Of one without an id nobody can tell whether it is a copy: then each is taken for one.
        self.task_id = str(delivery.message.properties.get("message_id") or key.digest)
        self._delivery = delivery
        self._handler = handler

    def run(self, execution: BaseExecution) -> None:
        mark = current_execution.set(execution)
        try:
            self._handler(self._delivery.body, self._delivery.message)
        finally:
            current_execution.reset(mark)

    def recover_result(self, record: Record, error: IdempotencyError) -> None:
        """That it completed is all that a message wants to know."""

    def replayed(self, record: Record) -> None:
        self.was_replayed = True

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
        raise _ComeBackError(seconds, unanswered_ids) from reason

    def ignore(self) -> NoReturn:
        raise _IgnoredError

    def reject(self, reason: str) -> NoReturn:
        raise _RejectedError(reason)


class _ComeBackError(Exception):
    def __init__(self, seconds: float, unanswered_ids: bytes) -> None:
        super().__init__(seconds, unanswered_ids)
        self.seconds = seconds
        self.unanswered_ids = unanswered_ids


class _IgnoredError(Exception):
    pass


class _RejectedError(Exception):
    pass
