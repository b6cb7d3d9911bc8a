"""The connections to brokers with a visibility timeout, for the thread of `Renewal`.

Also the changes to kombu's Redis transport that a renewed, short visibility timeout needs.
"""

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
from celery_idempotent.redelivery.unacked import UnackedMessage

#: Members in one ZADD, which Redis executes at once.
REDIS_BATCH = 1000
#: Maximum seconds for a command of Redis.
SOCKET_TIMEOUT = 5.0
#: Lifetime of the lock under which kombu searches for messages to redeliver, in seconds: a worker
#: that dies with the lock keeps others from searching so long (kombu's default is 300). Two
#: searches at a time do no harm, since each message is restored in a transaction.
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
        # Only copies of it are opened, because kombu cannot open a connection again after an error.
        self._template = connection.clone()
        self._connection: Any = None

    @cached_property
    def channel(self) -> Any:
        """A channel, opened at the first use, and again after :meth:`close`."""
        self._connection = self._template.clone()
        return self._connection.channel()

    def renew(self, messages: list[UnackedMessage], seconds: float) -> None:
        """Hides `messages` from other workers for the next `seconds`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Redelivers messages whose visibility timeout is over, where that is left to clients."""

    def close(self) -> None:
        """Closes the connection; the next call opens another one."""
        self.__dict__.pop("channel", None)
        if self._connection is not None:
            self._connection.close()


class SqsBroker(OwnConnection):
    """Amazon SQS: each delivery has a visibility timeout, which its receiver may change."""

    def renew(self, messages: list[UnackedMessage], seconds: float) -> None:
        """See `OwnConnection`; an entry fails if its message was deleted meanwhile."""
        now = lease_now()
        # By queue, then by message id: a later delivery of the same message replaces an earlier one
        # here, since SQS accepts only the receipt of the latest.
        queues: dict[tuple[str, str | None], dict[str, dict[str, Any]]] = defaultdict(dict)
        for message in messages:
            info = message.delivery_info
            timeout = min(math.ceil(seconds), int(message.received_at + SQS_LONGEST - now))
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
    """Redis: kombu has a sorted set of delivery tags; each score is the time of the delivery.

    All workers search that set. The first one that finds a score older than the visibility timeout
    redelivers the message. A renewal therefore only writes a new score.
    """

    def __init__(self, connection: Any) -> None:
        options = {
            "socket_timeout": SOCKET_TIMEOUT,
            "socket_connect_timeout": SOCKET_TIMEOUT,
            **connection.transport_options,
            "unacked_mutex_expire": MUTEX_EXPIRE,
        }
        super().__init__(connection.clone(transport_options=options))
        # Shared, because it has the types of the exchanges that the worker has declared: see
        # `declare_exchanges`.
        self._state = connection.transport.state

    @cached_property
    def channel(self) -> Any:
        """See `OwnConnection`."""
        channel = super().channel
        channel.connection.state = self._state
        return channel

    def renew(self, messages: list[UnackedMessage], seconds: float) -> None:
        """See `OwnConnection`."""
        channel = self.channel
        score = score_of(channel, seconds)
        tags = iter([message.delivery_tag for message in messages])
        while batch := list(islice(tags, REDIS_BATCH)):
            # XX only changes scores that exist. Added again, the tag of a message that was
            # acknowledged or restored meanwhile would redeliver it.
            channel.client.zadd(channel.unacked_index_key, dict.fromkeys(batch, score), xx=True)

    def restore(self) -> None:
        """See `OwnConnection`. kombu searches every 100 s, in the solo pool only between tasks."""
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
    """Sets `MUTEX_EXPIRE` also for kombu's own searches, unless the user has set the option.

    It applies to all connections of the app, since kombu searches by any channel.
    """
    if configured_broker.is_redis(app):
        options = {"unacked_mutex_expire": MUTEX_EXPIRE}
        app.conf.broker_transport_options = options | configured_broker.options_of(app)


def declare_exchanges(channel: Any, queues: Iterable[Any]) -> None:
    """Declares the exchanges of `queues`, which are all queues of the app, in this process.

    A search restores the messages of all workers. kombu would lose those of an exchange that this
    process has not declared, unless the exchange is direct.
    """
    for queue in queues:
        for exchange in (queue.exchange, *(binding.exchange for binding in queue.bindings)):
            # Two queues may declare one exchange differently. Celery reports that for the queues
            # that the worker consumes.
            with suppress(virtual.NotEquivalentError):
                if exchange is not None:
                    exchange.declare(channel=channel)


def hide_from_delivery_on(qos: Any, seconds: float, includes: Callable[[Any], bool]) -> None:
    """Makes kombu hide messages for `seconds` as it receives them, without another round trip.

    Without it, a message would have the score of now until its first renewal. It also makes kombu
    reuse one client, which otherwise creates one to receive and one to acknowledge each message:
    that takes a quarter of the main process's time for it.

    It replaces two methods of `qos`, as Celery itself does with one (``worker_disable_prefetch``).
    If another version of kombu stores the score in another way, the first renewal sets it within a
    second.

    Args:
        qos: that of the consumer's channel.
        includes: returns whether to hide a message with these headers.
    """
    append, pipe_or_acquire = qos.append, qos.pipe_or_acquire
    is_hiding, client = False, None

    def reused() -> Any:
        nonlocal client
        if client is None or client.connection_pool is not qos.channel.pool:
            with qos.channel.conn_or_acquire() as client:
                pass
        return client

    def append_hidden(message: Any, delivery_tag: str) -> None:
        nonlocal is_hiding
        is_hiding = includes(message.headers)
        try:
            append(message, delivery_tag)
        finally:
            is_hiding = False

    @contextmanager
    def pipe_or_reuse(pipe: Any = None, **options: Any) -> Iterator[Any]:
        with pipe_or_acquire(pipe, **{"client": None if pipe else reused(), **options}) as pipe:
            yield _Pipeline(pipe, score_of(qos.channel, seconds)) if is_hiding else pipe

    qos.append, qos.pipe_or_acquire = append_hidden, pipe_or_reuse


def free_slots_of_failed_acks(qos: Any) -> None:
    """Makes kombu prefetch another message in place of one that it could not acknowledge.

    Otherwise such a message counts as unacknowledged until the connection is lost. A worker that
    has reached its prefetch limit does not notice the loss, and takes no more messages. The message
    is redelivered later, and replayed.

    Args:
        qos: that of the consumer's channel.
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
    """A pipeline of redis-py that replaces the scores of ZADD by `score`."""

    def __init__(self, pipe: Any, score: float) -> None:
        self._pipe = pipe
        self._score = score

    def zadd(self, name: str, scores: dict[str, float]) -> Any:
        return self._pipe.zadd(name, dict.fromkeys(scores, self._score))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)
