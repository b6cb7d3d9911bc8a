"""Idempotent kombu consumers on Redis and RabbitMQ."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from kombu import Connection, Queue

from celery_idempotent import Idempotency, PoisonedTaskError
from celery_idempotent.contrib.kombu import KEY_HEADER, REASON_HEADER, IdempotentConsumer
from celery_idempotent.core.key import Key
from celery_idempotent.errors import CorruptRecordError, KeyReusedError, KeyRuleError, SettingsError
from tests.conftest import exhaustive_except
from tests.functions.consumers.conftest import SHORT_VISIBILITY, ConsumerHarness
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

MESSAGES = 400


def test_duplicates_are_handled_once(harness: ConsumerHarness) -> None:
    for _ in range(3):
        harness.publish({"order": 1}, "order:1")
    harness.publish({"order": 2}, message_id="order:2")
    harness.publish({"order": 2}, message_id="order:2")
    harness.publish({"order": 3}, "order:3")

    harness.consume(lambda: {"order": 3} in harness.handled)

    assert harness.handled == [{"order": 1}, {"order": 2}, {"order": 3}]
    assert harness.drain() == []


def test_a_failed_message_is_retried_then_dead_lettered(
    harness: ConsumerHarness, server: RedisServer, key: str
) -> None:
    times = []

    def fail(body: Any) -> None:
        times.append(time.monotonic())
        raise ValueError("declined")

    harness.idem = Idempotency(server.url, key_prefix=key, max_attempts=2)
    harness.publish({"order": 1}, "order:1")
    harness.consume(lambda: len(times) == 2, fail)

    assert times[1] - times[0] >= 0.7  # the retry is delayed
    (dead_letter,) = harness.dead_letters()
    assert dead_letter.payload == {"order": 1}
    assert dead_letter.headers[REASON_HEADER] == "its handler raised ValueError"
    assert dead_letter.headers[KEY_HEADER] == "order:1"
    assert harness.drain() == []


@pytest.mark.parametrize("policy", ["reject", "ignore"])
def test_a_failed_message_is_rejected_or_ignored(harness: ConsumerHarness, policy: str) -> None:
    harness.publish({"order": 1}, "order:1")
    harness.consume(lambda: bool(harness.handled), lambda body: 1 / 0, on_error=policy)

    assert len(harness.dead_letters()) == (1 if policy == "reject" else 0)
    assert harness.drain() == []


@pytest.mark.exhaustive
def test_a_conflicting_message_is_retried_until_the_key_is_free(harness: ConsumerHarness) -> None:
    key = uuid4().hex
    harness.publish({"order": 1}, key)
    with harness.idem.execution(key) as holder:
        with pytest.raises(AssertionError, match="timed out"):
            harness.consume(lambda: bool(harness.handled), seconds=1.5)
        holder.check()
    before = time.monotonic()
    harness.consume(lambda: bool(harness.handled))

    assert harness.handled == [{"order": 1}]
    assert time.monotonic() - before < 15
    assert harness.drain() == []


@pytest.mark.parametrize("policy", ["ignore", "reject"])
def test_a_conflict_is_ignored_or_rejected(harness: ConsumerHarness, policy: str) -> None:
    key = uuid4().hex
    with harness.idem.execution(key):
        harness.publish({"order": 1}, key, message_id="a")
        harness.publish({"order": 2}, uuid4().hex, message_id="b")
        harness.consume(lambda: {"order": 2} in harness.handled, on_conflict=policy)

    assert harness.handled == [{"order": 2}]
    assert len(harness.dead_letters()) == (1 if policy == "reject" else 0)
    assert harness.drain() == []


def test_no_key_or_another_body_is_dead_lettered(harness: ConsumerHarness) -> None:
    harness.publish({"order": 1})
    harness.publish({"order": 2}, "order:2")
    harness.publish({"order": "another"}, "order:2")
    harness.publish({"order": 3}, "order:3")
    harness.consume(lambda: {"order": 3} in harness.handled)

    reasons = [message.headers[REASON_HEADER] for message in harness.dead_letters()]
    assert len(reasons) == 2
    assert "which is not a key" in reasons[0]
    assert "other arguments" in reasons[1]


def test_a_key_can_be_derived_from_the_body(harness: ConsumerHarness) -> None:
    for _ in range(2):
        harness.publish({"order": 1})
    harness.publish({"order": 2})
    harness.consume(
        lambda: {"order": 2} in harness.handled, key=lambda body, message: f"order:{body['order']}"
    )

    assert harness.handled == [{"order": 1}, {"order": 2}]


@pytest.mark.exhaustive
def test_without_a_store_a_message_is_delayed_or_run(harness: ConsumerHarness) -> None:
    harness.idem = Idempotency("redis://127.0.0.1:1", redis_timeout=0.2)
    harness.publish({"order": 1}, "order:1")

    with pytest.raises(AssertionError, match="timed out"):
        harness.consume(lambda: bool(harness.handled), seconds=1)
    harness.consume(lambda: bool(harness.handled), on_store_error="run")

    assert harness.handled == [{"order": 1}]


def test_an_invalid_policy_is_rejected(idem: Idempotency) -> None:
    with pytest.raises(SettingsError, match="on_conflict must be one of 'retry', 'ignore'"):
        IdempotentConsumer(idem, Connection("memory://"), [], print, on_conflict="wait")


@pytest.mark.exhaustive
def test_no_message_is_lost_or_repeated_when_one_of_two_consumers_is_killed(
    idem: Idempotency,
    broker: tuple[str, dict[str, Any]],
    harness: ConsumerHarness,
    server: RedisServer,
    client: redis.Redis,
) -> None:
    queue = harness.queue.name
    for number in range(MESSAGES):
        harness.publish({"number": number}, f"number:{number}", message_id=f"m{number}")
        if number % 10 == 0:  # and a duplicate of every tenth one
            harness.publish({"number": number}, f"number:{number}", message_id=f"copy{number}")

    def start(name: str) -> subprocess.Popen[bytes]:
        url, options = broker
        command = [sys.executable, "-m", "tests.functions.consumers.test_consumers", url]
        command += [json.dumps(options), server.url, queue, name]
        return subprocess.Popen(command, cwd=Path(__file__).parents[3])

    victim = start("victim")
    other = None
    try:
        eventually(lambda: client.exists(f"{queue}:victim-is-handling") == 1, seconds=100)
        other = start("other")
        eventually(lambda: client.hlen(f"{queue}:handled") > MESSAGES // 2, seconds=100)
        victim.kill()
        eventually(lambda: client.hlen(f"{queue}:handled") == MESSAGES, seconds=100)
    finally:
        victim.kill()
        victim.wait()
        if other is not None:
            other.terminate()
            other.wait(20)

    handled = client.hgetall(f"{queue}:handled")
    assert len(handled) == MESSAGES
    assert set(handled.values()) == {b"1"}


def consume_in_this_process(broker: str, options: str, url: str, queue: str, name: str) -> None:
    """Consumes until SIGTERM; the victim never ends with message 100."""
    idem = Idempotency(url, key_prefix=queue, lease=1)
    ledger = redis.Redis.from_url(url)

    def handle(body: Any, message: Any) -> None:
        if body["number"] == 100 and name == "victim":
            ledger.set(f"{queue}:victim-is-handling", "1")
            time.sleep(3600)
        ledger.hincrby(f"{queue}:handled", body["number"], 1)

    def stop(*_: object) -> None:
        consumer.should_stop = True

    connection = Connection(broker, transport_options=json.loads(options))
    queues = [Queue(queue, routing_key=queue)]
    consumer = IdempotentConsumer(idem, connection, queues, handle, prefetch_count=20)
    signal.signal(signal.SIGTERM, stop)
    consumer.run(safety_interval=0.2)


def test_a_disabled_engine_handles_every_message(harness: ConsumerHarness) -> None:
    harness.idem = Idempotency("redis://127.0.0.1:1", enabled=False)
    for _ in range(2):
        harness.publish({"order": 1}, "order:1")
    harness.consume(lambda: len(harness.handled) == 2)

    assert harness.drain() == []


# The errors of a handler, and bad keys, concern their own message only.


@pytest.mark.parametrize(
    "error",
    exhaustive_except(
        [KeyReusedError, KeyRuleError, CorruptRecordError, PoisonedTaskError], KeyReusedError
    ),
)
def test_an_error_of_the_handler_about_another_key_sank_the_message(
    harness: ConsumerHarness, error: type[Exception]
) -> None:
    """It was dead-lettered at once, as if its own key were unusable."""

    def fail_once(body: Any) -> None:
        if len(harness.handled) == 1:
            raise error("of another key")

    harness.publish({"order": 1}, "order:1")
    harness.consume(lambda: len(harness.handled) == 2, fail_once)

    assert harness.dead_letters() == []
    assert harness.drain() == []


def test_a_duplicate_of_a_handler_s_stored_error_is_acknowledged(
    harness: ConsumerHarness, server: RedisServer, key: str
) -> None:
    harness.idem = Idempotency(server.url, key_prefix=key, replay_errors=(KeyReusedError,))

    def refuse(body: Any) -> None:
        if body["order"] == 1:
            raise KeyReusedError("of another key")

    for order in (1, 1, 2):
        harness.publish({"order": order}, f"order:{order}")
    harness.consume(lambda: {"order": 2} in harness.handled, refuse)

    (dead_letter,) = harness.dead_letters()
    assert dead_letter.headers[REASON_HEADER] == "its handler raised KeyReusedError"
    assert harness.handled == [{"order": 1}, {"order": 2}]
    assert harness.drain() == []


class Ambiguous:
    """A key whose truth value is an error, like that of an array."""

    def __len__(self) -> int:
        raise ValueError("secret")


BAD_KEYS: dict[str, Any] = {
    "empty": "",
    "false": False,
    "nothing": None,
    "not a number": {"a": float("nan")},
    "nested": ["a", ["b", object()]],
    "ambiguous": Ambiguous(),
    "derived": Key("calls", "digest"),
}


def test_a_bad_key_is_that_message_s_fate_alone(harness: ConsumerHarness) -> None:
    keys = {"first": "order:1", **BAD_KEYS, "last": "order:3"}
    for order in keys:
        harness.publish(order, message_id=order)

    harness.consume(lambda: "last" in harness.handled, key=lambda body, message: keys[body])

    dead_letters = harness.dead_letters()
    assert [dead_letter.payload for dead_letter in dead_letters] == list(BAD_KEYS)
    for dead_letter in dead_letters:
        assert dead_letter.headers[REASON_HEADER].startswith("calls: ")
        assert "secret" not in dead_letter.headers[REASON_HEADER]
    assert harness.handled == ["first", "last"]


def test_an_empty_key_header_does_not_give_way_to_the_message_id(harness: ConsumerHarness) -> None:
    harness.publish({"order": 1}, message_id="m1", headers={KEY_HEADER: ""})
    harness.publish({"order": 2}, message_id="m2")

    harness.consume(lambda: {"order": 2} in harness.handled)

    (dead_letter,) = harness.dead_letters()
    assert "is empty, which is not a key" in dead_letter.headers[REASON_HEADER]


@pytest.mark.parametrize("message_id", ["m" * 70_000, "\ud800"], ids=["long", "surrogate"])
def test_a_message_id_that_no_record_can_hold_is_dead_lettered(
    idem: Idempotency, server: RedisServer, message_id: str
) -> None:
    harness = ConsumerHarness(idem, (server.url, SHORT_VISIBILITY))  # AMQP has shorter ones
    harness.publish({"order": 1}, "order:1", message_id=message_id)
    harness.publish({"order": 2}, "order:2")

    harness.consume(lambda: {"order": 2} in harness.handled)

    (dead_letter,) = harness.dead_letters()
    assert dead_letter.headers[REASON_HEADER].startswith("the task's id ")
    assert harness.handled == [{"order": 2}]
    harness.connection.release()


if __name__ == "__main__":
    consume_in_this_process(*sys.argv[1:])
