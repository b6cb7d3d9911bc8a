"""Redis: kombu keeps the time of each delivery in a sorted set, and workers search it.

The first worker that finds a score older than the visibility timeout redelivers its message. A new
score is therefore all that a renewal needs; other workers take no part in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

from celery_idempotent.redelivery.broker import OwnConnection
from celery_idempotent.redelivery.held import HeldMessage

#: Members in one ZADD, which Redis executes at once.
BATCH = 1000
#: Maximum seconds for a command.
SOCKET_TIMEOUT = 5.0
#: Seconds for which a worker that dies during a search keeps others from searching; 300 by default
#: in kombu.
MUTEX_EXPIRE = 10


class RedisBroker(OwnConnection):
    """A connection to the broker of the worker's consumer.

    Args:
        connection: the consumer's; it is not used by the thread of `Renewal`.
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
        tags = iter([message.message.delivery_tag for message in messages])
        while batch := list(islice(tags, BATCH)):
            # XX: a message that was acknowledged, or restored, meanwhile does not come back.
            channel.client.zadd(channel.unacked_index_key, dict.fromkeys(batch, score), xx=True)

    def restore(self) -> None:
        """See `OwnConnection`; kombu does so every 100 s, in the solo pool between tasks."""
        channel = self.channel
        channel.qos.restore_visible(num=channel.unacked_restore_limit, interval=1)


def score_of(channel: Any, seconds: float) -> float:
    """Returns the score of a message that is to be redelivered in `seconds`."""
    return float(time.time() - channel.visibility_timeout + seconds)


def hide_from_delivery_on(qos: Any, seconds: float, includes: Callable[[Any], bool]) -> None:
    """Makes kombu hide messages for `seconds` as it receives them, without another round trip.

    Celery replaces a method of this object, too (``worker_disable_prefetch``). If another version
    of kombu stores the score in another way, the first renewal follows within a second.

    Args:
        qos: of the consumer's channel.
        includes: returns whether to hide a message with these headers.
    """
    append, pipe_or_acquire = qos.append, qos.pipe_or_acquire
    appends_held = False

    def append_held(message: Any, delivery_tag: str) -> None:
        nonlocal appends_held
        appends_held = includes(message.headers)
        try:
            append(message, delivery_tag)
        finally:
            appends_held = False

    @contextmanager
    def pipe_or_acquire_held(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with pipe_or_acquire(*args, **kwargs) as pipe:
            yield _Pipeline(pipe, score_of(qos.channel, seconds)) if appends_held else pipe

    qos.append, qos.pipe_or_acquire = append_held, pipe_or_acquire_held


class _Pipeline:
    """A pipeline that replaces the scores of ZADD."""

    def __init__(self, pipe: Any, score: float) -> None:
        self._pipe = pipe
        self._score = score

    def zadd(self, name: str, scores: dict[str, float]) -> Any:
        return self._pipe.zadd(name, dict.fromkeys(scores, self._score))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)
