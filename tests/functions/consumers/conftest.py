"""Brokers, and a harness on each that publishes messages and consumes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection, Exchange, Queue

from celery_idempotent import Idempotency
from celery_idempotent.contrib.kombu import KEY_HEADER, IdempotentConsumer
from tests.servers.redis_server import RedisServer

#: The broker redelivers the messages of a dead consumer after 3 to 4 seconds.
SHORT_VISIBILITY = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


class ConsumerHarness:
    """Publishes to a queue, and consumes from it in this thread."""

    def __init__(self, idem: Idempotency, broker: tuple[str, dict[str, Any]]) -> None:
        url, options = broker
        self.idem = idem
        self.connection = Connection(url, transport_options=options)
        self.queue = Queue(uuid4().hex, Exchange(""), routing_key="", durable=True)
        self.queue.routing_key = self.queue.name
        self.dead_letter_queue = Queue(f"dead-{self.queue.name}", Exchange(""))
        self.dead_letter_queue.routing_key = self.dead_letter_queue.name
        self.handled: list[Any] = []
        self._producer = self.connection.Producer()
        self.queue(self.connection.default_channel).declare()

    def publish(self, body: Any, key: str | None = None, **properties: Any) -> None:
        headers = {KEY_HEADER: key} if key else {}
        options = {"headers": headers, "serializer": "json", **properties}
        self._producer.publish(body, routing_key=self.queue.name, **options)

    def consume(
        self,
        until: Callable[[], bool],
        handle: Callable[[Any], Any] = lambda body: None,
        seconds: float = 60,
        **options: Any,
    ) -> IdempotentConsumer:
        """Consumes until `until` holds; each message is then acknowledged or delayed."""

        def record(body: Any, message: Any) -> Any:
            self.handled.append(body)
            return handle(body)

        options = {"dead_letter_queue": self.dead_letter_queue, **options}
        connection = self.connection.clone()
        consumer = IdempotentConsumer(self.idem, connection, [self.queue], record, **options)
        deadline = time.monotonic() + seconds
        on_iteration = consumer.on_iteration

        def iterate_and_stop() -> None:
            on_iteration()
            consumer.should_stop = until() or time.monotonic() > deadline

        consumer.on_iteration = iterate_and_stop  # type: ignore[method-assign]
        consumer.run(safety_interval=0.1)
        assert until(), "timed out"
        return consumer

    def drain(self, queue: Queue | None = None) -> list[Any]:
        """Removes and returns the messages of the queue."""
        messages = []
        bound = (queue or self.queue)(self.connection.default_channel)
        bound.declare()
        while message := bound.get(accept=["json"]):
            messages.append(message)
            message.ack()
        return messages

    def dead_letters(self) -> list[Any]:
        """Removes and returns the messages that were dead-lettered."""
        return self.drain(self.dead_letter_queue)


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def broker(request: pytest.FixtureRequest, server: RedisServer) -> tuple[str, dict[str, Any]]:
    if request.param == "rabbitmq":
        return request.getfixturevalue("rabbitmq").url, {"confirm_publish": True}
    return server.url, SHORT_VISIBILITY


@pytest.fixture
def harness(idem: Idempotency, broker: tuple[str, dict[str, Any]]) -> Iterator[ConsumerHarness]:
    harness = ConsumerHarness(idem, broker)
    yield harness
    harness.connection.release()
