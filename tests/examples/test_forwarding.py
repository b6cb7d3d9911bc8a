"""The forwarding example: two forwarders forward each webhook once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from kombu import Connection
from redis import Redis

from celery_idempotent import Idempotency
from examples.forwarding.forward import BATCH, Forwarder
from tests.servers.redis_server import RedisServer

WEBHOOKS = 300


@pytest.fixture
def url() -> Iterator[str]:
    with RedisServer.start(config={}) as server:
        yield server.url


def test_a_webhook_without_an_id_is_rejected_alone(url: str) -> None:
    source, target = uuid4().hex, uuid4().hex
    forwarder = Forwarder(Connection(url), Idempotency(url), source, target)
    producer = forwarder.connection.Producer()
    for webhook in ({"id": "evt-1"}, {"id": None}, {}, "no webhook", {"id": "evt-2"}):
        producer.publish(webhook, routing_key=source, serializer="json")

    forwarder.run(lambda: forwarder.forwarded == 2)

    with Redis.from_url(url) as client:
        assert client.llen(target) == 2
        assert client.llen(source) == client.hlen("unacked") == 0
    forwarder.connection.release()
    forwarder.idem.close()


@pytest.mark.exhaustive
def test_each_webhook_is_forwarded_once(url: str) -> None:
    source, target = uuid4().hex, uuid4().hex
    with Connection(url) as connection:
        producer = connection.Producer()
        for number in range(WEBHOOKS):
            for _ in range(1 + number % 2):  # every second webhook is duplicated
                producer.publish({"id": f"evt-{number}"}, routing_key=source, serializer="json")
        total = WEBHOOKS + WEBHOOKS // 2
        engines = [Idempotency(url), Idempotency(url)]
        forwarders = [Forwarder(Connection(url), each, source, target) for each in engines]
        client = connection.default_channel.client

        def forwarded() -> int:
            return sum(forwarder.forwarded for forwarder in forwarders)

        def done() -> bool:
            is_idle = not any(forwarder._received for forwarder in forwarders)
            return forwarded() >= WEBHOOKS and not client.llen(source) and is_idle

        with ThreadPoolExecutor(2) as threads:
            for ended in [threads.submit(forwarder.run, done) for forwarder in forwarders]:
                ended.result()

        assert forwarded() == WEBHOOKS
        assert client.llen(target) == WEBHOOKS
        assert total > 3 * BATCH
    for forwarder in forwarders:
        forwarder.connection.release()
        forwarder.idem.close()
