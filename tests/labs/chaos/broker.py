"""The broker, behind a proxy, and how it is struck. It is never killed: see docs/outages.md."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import amqp

from celery_idempotent.testing.process import Stoppable
from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.labs.chaos.app import QUEUE
from tests.labs.chaos.schedule import Shape
from tests.servers.rabbitmq import RabbitMQ

#: Publishes whose reply is lost at a time.
REPLIES = 3


class Broker(Stoppable):
    """A broker. Every fault returns when it is whole again.

    Attributes:
        settings: of the app that uses it.
        tells_all: whether `messages` counts those that are delivered and not acknowledged, too.
    """

    settings: Mapping[str, Any]
    tells_all = True

    def __init__(self, server: RedisServer | RabbitMQ) -> None:
        self._server = server
        self._proxy = Proxy(server.url)

    def messages(self) -> int:
        """How many it has."""
        raise NotImplementedError

    def cut(self, aim: float, seconds: float) -> None:
        """End every connection, again and again."""
        until = time.monotonic() + seconds
        while True:
            self._proxy.reset()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def black_hole(self, aim: float, seconds: float) -> None:
        """Hold back whatever either side says."""
        self._proxy.black_hole()
        time.sleep(seconds)
        self._proxy.heal()

    def lose_publish_replies(self, aim: float, seconds: float) -> None:
        """Take messages, and close the connection instead of saying so. Redis only."""
        for _ in range(REPLIES):
            self._proxy.lose_reply("LPUSH")

    def stop(self) -> None:
        self._proxy.stop()
        self._server.stop()


class Redis(Broker):
    """Messages that a dead worker had are handed out again after some seconds."""

    def __init__(self) -> None:
        super().__init__(server := RedisServer.start(config={"databases": "1"}))
        self._client = server.client()
        self.settings = {
            "broker_url": self._proxy.url,
            "broker_transport_options": {
                "visibility_timeout": 4,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
                # Whoever dies amid handing out again keeps all others from it: for five minutes.
                "unacked_mutex_expire": 2,
            },
        }

    def messages(self) -> int:
        waiting, delivered = self._client.llen(QUEUE), self._client.hlen("unacked")
        return int(waiting) + int(delivered)


class Rabbit(Broker):
    """Every publish is confirmed: what a client was not told is accepted, nobody can lose."""

    tells_all = False

    def __init__(self) -> None:
        super().__init__(server := RabbitMQ.start())
        self._address = server.url.rpartition("@")[2].rstrip("/")
        self.settings = {
            "broker_url": self._proxy.url,
            "broker_transport_options": {"confirm_publish": True},
        }

    def messages(self) -> int:
        try:
            with amqp.Connection(self._address, login_method="PLAIN") as connection:
                return int(connection.channel().queue_declare(QUEUE, passive=True).message_count)
        except (OSError, amqp.AMQPError):
            return 1

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            super().stop()


def broker_for(shape: Shape) -> Broker:
    """The broker of `shape`."""
    return Redis() if shape.broker == "redis" else Rabbit()
