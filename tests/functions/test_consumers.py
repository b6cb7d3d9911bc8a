"""kombu consumers behind the gate, on both brokers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from kombu import Connection, Exchange, Queue

from celery_idempotent import Idempotency
from celery_idempotent.contrib.kombu import KEY_HEADER, REASON_HEADER, IdempotentConsumer
from celery_idempotent.errors import SettingsError
from celery_idempotent.testing.server import RedisServer
from tests.servers.rabbitmq import RabbitMQ

MESSAGES = 2000
#: The messages of a dead consumer are handed out again after 3 to 4 seconds.
SOON_VISIBLE = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitMQ]:
    with RabbitMQ.start() as server:
        yield server


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
def broker(request: pytest.FixtureRequest, server: RedisServer) -> tuple[str, dict[str, Any]]:
    if request.param == "rabbitmq":
        return request.getfixturevalue("rabbitmq").url, {"confirm_publish": True}
    return server.url, SOON_VISIBLE


class Bench:
    """A queue, what is published to it, and a consumer in this thread."""

    def __init__(self, idem: Idempotency, broker: tuple[str, dict[str, Any]]) -> None:
        url, options = broker
        self.idem = idem
        self.connection = Connection(url, transport_options=options)
        self.queue = Queue(uuid4().hex, Exchange(""), routing_key="", durable=True)
        self.queue.routing_key = self.queue.name
        self.dead = Queue(f"dead-{self.queue.name}", Exchange(""))
        self.dead.routing_key = self.dead.name
        self.handled: list[Any] = []
        self._producer = self.connection.Producer()
        self.queue(self.connection.default_channel).declare()

    def publish(self, body: Any, key: str | None = None, **properties: Any) -> None:
        headers = {KEY_HEADER: key} if key else {}
        self._producer.publish(
            body, routing_key=self.queue.name, headers=headers, serializer="json", **properties
        )

    def consume(
        self,
        until: Callable[[], bool],
        handle: Callable[[Any], Any] = lambda body: None,
        seconds: float = 60,
        **options: Any,
    ) -> IdempotentConsumer:
        """Consume until `until` holds and nothing is left unacknowledged here."""

        def note(body: Any, message: Any) -> Any:
            self.handled.append(body)
            return handle(body)

        consumer = IdempotentConsumer(
            self.idem, self.connection.clone(), [self.queue], note, **options
        )
        deadline = time.monotonic() + seconds
        on_iteration = consumer.on_iteration

        def stop_in_time() -> None:
            on_iteration()
            consumer.should_stop = until() or time.monotonic() > deadline

        consumer.on_iteration = stop_in_time  # type: ignore[method-assign]
        consumer.run(safety_interval=0.1)
        assert until(), "it never came"
        return consumer

    def left(self, queue: Queue | None = None) -> list[Any]:
        """Messages that are in the queue, taken out."""
        found = []
        channel = self.connection.default_channel
        bound = (queue or self.queue)(channel)
        bound.declare()
        while message := bound.get(accept=["json"]):
            found.append(message)
            message.ack()
        return found


@pytest.fixture
def bench(idem: Idempotency, broker: tuple[str, dict[str, Any]]) -> Iterator[Bench]:
    bench = Bench(idem, broker)
    yield bench
    bench.connection.release()


def test_copies_are_handled_once(bench: Bench) -> None:
    for _ in range(3):
        bench.publish({"order": 1}, "order:1")
    bench.publish({"order": 2}, message_id="order:2")
    bench.publish({"order": 2}, message_id="order:2")
    bench.publish({"order": 3}, "order:3")

    bench.consume(lambda: {"order": 3} in bench.handled)

    assert bench.handled == [{"order": 1}, {"order": 2}, {"order": 3}]
    assert bench.left() == []


def test_a_failure_is_tried_again_then_buried(bench: Bench, server: RedisServer, key: str) -> None:
    times = []

    def fail(body: Any) -> None:
        times.append(time.monotonic())
        raise ValueError("declined")

    bench.idem = Idempotency(server.url, key_prefix=key, max_attempts=2)
    bench.publish({"order": 1}, "order:1")
    bench.consume(lambda: len(times) == 2, fail, dead_letter_queue=bench.dead)

    assert times[1] - times[0] >= 0.7  # not in a hot loop
    (dead,) = bench.left(bench.dead)
    assert dead.payload == {"order": 1}
    assert dead.headers[REASON_HEADER] == "its handler raised ValueError"
    assert dead.headers[KEY_HEADER] == "order:1"
    assert bench.left() == []


@pytest.mark.parametrize("policy", ["reject", "ignore"])
def test_it_can_be_buried_at_once_or_ignored(bench: Bench, policy: str) -> None:
    bench.publish({"order": 1}, "order:1")
    bench.consume(
        lambda: bool(bench.handled),
        lambda body: 1 / 0,
        dead_letter_queue=bench.dead,
        on_error=policy,
    )

    assert len(bench.left(bench.dead)) == (1 if policy == "reject" else 0)
    assert bench.left() == []


def test_a_conflict_waits_its_time_and_loses_nothing(bench: Bench) -> None:
    key = uuid4().hex
    bench.publish({"order": 1}, key)
    with bench.idem.execution(key) as other:
        with pytest.raises(AssertionError, match="it never came"):
            bench.consume(lambda: bool(bench.handled), seconds=1.5)
        other.check()
    before = time.monotonic()
    bench.consume(lambda: bool(bench.handled))

    assert bench.handled == [{"order": 1}]
    assert time.monotonic() - before < 15
    assert bench.left() == []


@pytest.mark.parametrize("policy", ["ignore", "reject"])
def test_a_conflict_can_be_ignored_or_buried(bench: Bench, policy: str) -> None:
    key = uuid4().hex
    with bench.idem.execution(key):
        bench.publish({"order": 1}, key, message_id="a")
        bench.publish({"order": 2}, uuid4().hex, message_id="b")
        bench.consume(
            lambda: {"order": 2} in bench.handled, on_conflict=policy, dead_letter_queue=bench.dead
        )

    assert bench.handled == [{"order": 2}]
    assert len(bench.left(bench.dead)) == (1 if policy == "reject" else 0)
    assert bench.left() == []


def test_what_has_no_key_or_another_body_is_buried(bench: Bench) -> None:
    bench.publish({"order": 1})
    bench.publish({"order": 2}, "order:2")
    bench.publish({"order": "another"}, "order:2")
    bench.publish({"order": 3}, "order:3")
    bench.consume(lambda: {"order": 3} in bench.handled, dead_letter_queue=bench.dead)

    reasons = [message.headers[REASON_HEADER] for message in bench.left(bench.dead)]
    assert len(reasons) == 2
    assert "which is not a key" in reasons[0]
    assert "other arguments" in reasons[1]


def test_a_key_can_be_made_of_the_body(bench: Bench) -> None:
    for _ in range(2):
        bench.publish({"order": 1})
    bench.publish({"order": 2})
    bench.consume(
        lambda: {"order": 2} in bench.handled, key=lambda body, message: f"order:{body['order']}"
    )

    assert bench.handled == [{"order": 1}, {"order": 2}]


def test_without_a_store_a_message_waits_or_runs(bench: Bench) -> None:
    bench.idem = Idempotency("redis://127.0.0.1:1", redis_timeout=0.2)
    bench.publish({"order": 1}, "order:1")

    with pytest.raises(AssertionError, match="it never came"):
        bench.consume(lambda: bool(bench.handled), seconds=1)
    bench.consume(lambda: bool(bench.handled), on_store_error="run")

    assert bench.handled == [{"order": 1}]


def test_a_wrong_policy_is_refused(idem: Idempotency) -> None:
    with pytest.raises(SettingsError, match="on_conflict must be one of 'retry', 'ignore'"):
        IdempotentConsumer(
            idem, Connection("memory://"), [], lambda body, message: None, on_conflict="wait"
        )


@pytest.mark.timeout(300)  # two processes and a broker, on whatever else the machine does
def test_of_a_pair_one_is_killed_in_the_middle_and_nothing_is_lost_or_doubled(
    idem: Idempotency,
    broker: tuple[str, dict[str, Any]],
    bench: Bench,
    server: RedisServer,
    client: redis.Redis,
) -> None:
    queue = bench.queue.name
    for number in range(MESSAGES):
        bench.publish({"number": number}, f"number:{number}", message_id=f"m{number}")
        if number % 10 == 0:  # and a copy of each tenth
            bench.publish({"number": number}, f"number:{number}", message_id=f"copy{number}")

    def start(name: str) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("consuming.py"))
        url, options = broker
        return subprocess.Popen(
            [sys.executable, script, url, json.dumps(options), server.url, queue, name]
        )

    victim = start("victim")
    other = None
    try:
        wait_for(lambda: client.exists(f"{queue}:in the middle") == 1)
        other = start("other")
        wait_for(lambda: client.hlen(f"{queue}:handled") > 1000)
        victim.kill()
        wait_for(lambda: client.hlen(f"{queue}:handled") == MESSAGES)
    finally:
        victim.kill()
        victim.wait()
        if other is not None:
            other.terminate()
            other.wait(20)

    handled = client.hgetall(f"{queue}:handled")
    assert len(handled) == MESSAGES
    assert set(handled.values()) == {b"1"}


def wait_for(condition: Callable[[], bool], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
