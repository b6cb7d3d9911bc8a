"""The broker behind a proxy, and its faults."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import amqp
from redis.exceptions import RedisError

from labs.chaos.app import QUEUES
from labs.chaos.schedule import Shape
from labs.chaos.stores import DURABLE
from tests.faults.proxy import Proxy
from tests.servers.program import Stoppable
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer

#: Number of replies to publishes that one fault drops.
REPLIES = 3


class Broker(Stoppable):
    """A broker. Every fault returns when the broker works again.

    Attributes:
        settings: of the app that uses it.
        own_options: its ``broker_transport_options`` with celery-idempotent.
        counts_unacknowledged: whether `messages` includes unacknowledged messages.
    """

    settings: Mapping[str, Any]
    own_options: Mapping[str, Any]
    counts_unacknowledged = True

    def __init__(self, server: RedisServer | RabbitMQ) -> None:
        self._server = server
        self._proxy = Proxy(server.url)

    def messages(self) -> int:
        """Returns the number of messages."""
        raise NotImplementedError

    def cut(self, target: float, seconds: float) -> None:
        """Resets all connections repeatedly."""
        until = time.monotonic() + seconds
        while True:
            self._proxy.reset()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def black_hole(self, target: float, seconds: float) -> None:
        """Holds back the data of both sides."""
        self._proxy.black_hole()
        time.sleep(seconds)
        self._proxy.heal()

    def kill(self, target: float, seconds: float) -> None:
        """Kills the server and restarts it after `seconds`; it keeps the messages it accepted."""
        self._server.kill()
        time.sleep(seconds)
        self._server.restart()

    def lose_publish_replies(self, target: float, seconds: float) -> None:
        """Closes connections instead of acknowledging publishes; Redis only."""
        for _ in range(REPLIES):
            self._proxy.lose_reply("LPUSH")

    def stop(self) -> None:
        self._proxy.stop()
        self._server.stop()


class Redis(Broker):
    """Redis; messages of a dead worker are redelivered after a few seconds.

    With celery-idempotent that does not depend on kombu's options, which keep their defaults: the
    visibility timeout is an hour.
    """

    own_options: Mapping[str, Any] = {}

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__(server := RedisServer.start(config={"databases": "1", **config}))
        self._client = server.client()
        self.settings = {
            "broker_url": self._proxy.url,
            "broker_transport_options": {
                "visibility_timeout": 4,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
                # A worker that dies during redelivery blocks it for all others, for five minutes
                # by default.
                "unacked_mutex_expire": 2,
            },
        }

    def messages(self) -> int:
        try:
            waiting = sum(self._client.llen(queue) for queue in QUEUES)
            delivered = self._client.hlen("unacked")
        except RedisError:  # killed
            return 1
        return int(waiting) + int(delivered)


class Rabbit(Broker):
    """RabbitMQ with publisher confirms."""

    counts_unacknowledged = False
    own_options: Mapping[str, Any] = {"confirm_publish": True}

    def __init__(self) -> None:
        super().__init__(server := RabbitMQ.start())
        self._address = server.url.rpartition("@")[2].rstrip("/")
        self.settings = {
            "broker_url": self._proxy.url,
            "broker_transport_options": self.own_options,
        }

    def messages(self) -> int:
        try:
            with amqp.Connection(self._address, login_method="PLAIN") as connection:
                channel = connection.channel()
                return sum(
                    int(channel.queue_declare(each, passive=True).message_count) for each in QUEUES
                )
        except (OSError, amqp.AMQPError):
            return 1

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            super().stop()


def broker_for(shape: Shape) -> Broker:
    """Starts the broker of `shape`."""
    if shape.broker == "rabbitmq":
        return Rabbit()
    # Where it is killed, what it has accepted must survive.
    return Redis(DURABLE if shape.transaction else {})
