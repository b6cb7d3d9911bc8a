"""The connections to brokers with a visibility timeout that the thread of `Renewal` uses."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from typing import Any

from celery import Celery
from kombu.transport import virtual

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.configuration import broker as configured_broker
from celery_idempotent.redelivery.held import HeldMessage

#: Members in one ZADD, which Redis executes at once.
REDIS_BATCH = 1000
#: Maximum seconds for a command of Redis.
SOCKET_TIMEOUT = 5.0
#: Seconds for which a worker that dies during a search keeps others from searching; 300 by default
#: in kombu. Two searches at a time do no harm: each message is restored in a transaction.
MUTEX_EXPIRE = 2
#: Maximum entries in one request to SQS.
SQS_BATCH = 10
#: Maximum seconds for which a message is hidden. SQS refuses more than 12 hours from its delivery,
#: some seconds of which it may have spent in kombu.
SQS_LONGEST = 12 * 3600 - 60.0


class OwnConnection:
    """A second connection, since no other thread may use that of the worker's consumer.

    Args:
        connection: the consumer's, or a copy of it.
    """

    def __init__(self, connection: Any) -> None:
        # Never connected itself: kombu cannot reopen a connection, so each one is a new copy.
        self._template = connection.clone()
        self._connection: Any = None

    @cached_property
    def channel(self) -> Any:
        """A channel, opened at the first use, and again after :meth:`close`."""
        self._connection = self._template.clone()
        return self._connection.channel()

    def renew(self, messages: list[HeldMessage], seconds: float) -> None:
        """Hides `messages` from other workers for the next `seconds`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Redelivers the messages whose time is over, unless the broker does so itself."""

    def close(self) -> None:
        """Closes the connection; the next call opens another one."""
        self.__dict__.pop("channel", None)
        if self._connection is not None:
            self._connection.close()


class SqsBroker(OwnConnection):
    """Amazon SQS: each delivery has a visibility timeout, which its receiver may change."""

    def renew(self, messages: list[HeldMessage], seconds: float) -> None:
        """See `OwnConnection`; an entry fails if its message was deleted meanwhile."""
        now = lease_now()
        # By message, since SQS accepts only the receipt of its latest delivery.
        queues: dict[tuple[str, str | None], dict[str, dict[str, Any]]] = defaultdict(dict)
        for held in messages:
            info = held.delivery_info
            timeout = min(math.ceil(seconds), int(held.received_at + SQS_LONGEST - now))
            if timeout > 0:
                received = info["sqs_message"]
                queues[info["sqs_queue"], info.get("routing_key")][received["MessageId"]] = {
                    "ReceiptHandle": received["ReceiptHandle"],
                    "VisibilityTimeout": timeout,
                }
        for (url, name), by_id in queues.items():
            client = self.channel.sqs(queue=name and self.channel.canonical_queue_name(name))
            entries = iter(by_id.values())
            while batch := [
                {"Id": str(number), **entry}
                for number, entry in enumerate(islice(entries, SQS_BATCH))
            ]:
                client.change_message_visibility_batch(QueueUrl=url, Entries=batch)


class RedisBroker(OwnConnection):
    """Redis: kombu keeps the time of each delivery in a sorted set, and workers search it.

    The first worker that finds a score older than the visibility timeout redelivers its message. A
    new score is therefore all that a renewal needs; other workers take no part in it.
    """

    def __init__(self, connection: Any) -> None:
        options = {
            "socket_timeout": SOCKET_TIMEOUT,
            "socket_connect_timeout": SOCKET_TIMEOUT,
            **connection.transport_options,
            "unacked_mutex_expire": MUTEX_EXPIRE,
        }
        super().__init__(connection.clone(transport_options=options))
        # Has the types of the exchanges that the worker has declared.
        self._state = connection.transport.state

    @cached_property
    def channel(self) -> Any:
        """See `OwnConnection`."""
        channel = super().channel
        channel.connection.state = self._state
        return channel

    def renew(self, messages: list[HeldMessage], seconds: float) -> None:
        """See `OwnConnection`."""
        channel = self.channel
        score = score_of(channel, seconds)
        tags = iter([message.delivery_tag for message in messages])
        while batch := list(islice(tags, REDIS_BATCH)):
            # XX: a message that was acknowledged, or restored, meanwhile does not come back.
            channel.client.zadd(channel.unacked_index_key, dict.fromkeys(batch, score), xx=True)

    def restore(self) -> None:
        """See `OwnConnection`; kombu does so every 100 s, in the solo pool only between tasks."""
        channel = self.channel
        channel.qos.restore_visible(num=channel.unacked_restore_limit, interval=1)

    def close(self) -> None:
        """See `OwnConnection`; kombu leaves the descriptor of its poller to garbage collection."""
        poller = self._connection and self._connection.transport.cycle.poller
        try:
            super().close()
        finally:
            if poller:
                poller.close()


def score_of(channel: Any, seconds: float) -> float:
    """Returns the score of a message that is to be redelivered in `seconds`."""
    return float(time.time() - channel.visibility_timeout + seconds)


def shorten_lock(app: Celery) -> None:
    """Makes the lock of kombu's own searches expire soon, unless the user has set its option.

    It is an option of all connections, since kombu searches by any channel.
    """
    if configured_broker.is_redis(app):
        options = {"unacked_mutex_expire": MUTEX_EXPIRE}
        app.conf.broker_transport_options = options | configured_broker.options_of(app)


def declare_exchanges(channel: Any, queues: Iterable[Any]) -> None:
    """Declares the exchanges of `queues`, all those of the app, in this process.

    A search restores the messages of all workers. kombu would lose those of an exchange that this
    process has not declared, unless the exchange is direct.
    """
    for queue in queues:
        for exchange in (queue.exchange, *(binding.exchange for binding in queue.bindings)):
            # Celery reports a contradiction if the worker consumes the queue.
            with suppress(virtual.NotEquivalentError):
                if exchange is not None:
                    exchange.declare(channel=channel)


def hide_from_delivery_on(qos: Any, seconds: float, includes: Callable[[Any], bool]) -> None:
    """Makes kombu hide messages for `seconds` as it receives them, without another round trip.

    It also makes kombu use one client, instead of a new one to receive and another to acknowledge
    each message, which takes a quarter of the main process's time for it.

    Celery also replaces a method of this object (``worker_disable_prefetch``). If another version
    of kombu stores the score in another way, the first renewal sets it within a second.

    Args:
        qos: of the consumer's channel.
        includes: returns whether to hide a message with these headers.
    """
    append, pipe_or_acquire = qos.append, qos.pipe_or_acquire
    appends_held, kept = False, None

    def client() -> Any:
        nonlocal kept
        if kept is None or kept.connection_pool is not qos.channel.pool:
            with qos.channel.conn_or_acquire() as kept:
                pass
        return kept

    def append_held(message: Any, delivery_tag: str) -> None:
        nonlocal appends_held
        appends_held = includes(message.headers)
        try:
            append(message, delivery_tag)
        finally:
            appends_held = False

    @contextmanager
    def pipe_or_acquire_held(pipe: Any = None, **options: Any) -> Iterator[Any]:
        with pipe_or_acquire(pipe, **{"client": None if pipe else client(), **options}) as pipe:
            yield _Pipeline(pipe, score_of(qos.channel, seconds)) if appends_held else pipe

    qos.append, qos.pipe_or_acquire = append_held, pipe_or_acquire_held


def free_slots_of_failed_acks(qos: Any) -> None:
    """Makes kombu prefetch another message in place of one that it could not acknowledge.

    Such a message occupies its slot until the connection is lost, and a worker without a free slot
    does not notice the loss: it takes no more messages. The task has ended, and the message is
    redelivered.

    Args:
        qos: of the consumer's channel.
    """
    ack = qos.ack

    def ack_or_free(delivery_tag: str) -> None:
        try:
            ack(delivery_tag)
        except Exception:
            virtual.QoS.ack(qos, delivery_tag)
            raise

    qos.ack = ack_or_free


class _Pipeline:
    """A pipeline that replaces the scores of ZADD."""

    def __init__(self, pipe: Any, score: float) -> None:
        self._pipe = pipe
        self._score = score

    def zadd(self, name: str, scores: dict[str, float]) -> Any:
        return self._pipe.zadd(name, dict.fromkeys(scores, self._score))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)
