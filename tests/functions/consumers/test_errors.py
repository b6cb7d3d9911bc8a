"""The errors of a handler, and bad keys, concern their own message only."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent import (
    CorruptRecordError,
    Idempotency,
    KeyReusedError,
    KeyRuleError,
    PoisonedTaskError,
)
from celery_idempotent.contrib.kombu import KEY_HEADER, REASON_HEADER
from celery_idempotent.core.key import Key
from tests.conftest import exhaustive_except
from tests.functions.consumers.conftest import SHORT_VISIBILITY, ConsumerHarness
from tests.servers.redis_server import RedisServer


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
    harness.consume(
        lambda: len(harness.handled) == 2, fail_once, dead_letter_queue=harness.dead_letter_queue
    )

    assert harness.drain(harness.dead_letter_queue) == []
    assert harness.drain() == []


def test_a_handler_can_call_an_idempotent_function_that_refuses_it(
    harness: ConsumerHarness,
) -> None:
    charge = harness.idem.idempotent(key="{order}", name="shop.charge")(lambda order, amount: None)
    charge(1, amount=1)

    harness.publish({"order": 1, "amount": 2}, "order:1")
    harness.publish({"order": 2, "amount": 1}, "order:2")
    harness.consume(
        lambda: len(harness.handled) == 2,
        lambda body: charge(body["order"], amount=body["amount"]),
        dead_letter_queue=harness.dead_letter_queue,
        on_error="reject",
    )

    (dead_letter,) = harness.drain(harness.dead_letter_queue)
    assert dead_letter.headers[REASON_HEADER] == "its handler raised KeyReusedError"
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
    harness.consume(
        lambda: {"order": 2} in harness.handled, refuse, dead_letter_queue=harness.dead_letter_queue
    )

    (dead_letter,) = harness.drain(harness.dead_letter_queue)
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

    harness.consume(
        lambda: "last" in harness.handled,
        key=lambda body, message: keys[body],
        dead_letter_queue=harness.dead_letter_queue,
    )

    dead_letters = harness.drain(harness.dead_letter_queue)
    assert [dead_letter.payload for dead_letter in dead_letters] == list(BAD_KEYS)
    for dead_letter in dead_letters:
        assert dead_letter.headers[REASON_HEADER].startswith("calls: ")
        assert "secret" not in dead_letter.headers[REASON_HEADER]
    assert harness.handled == ["first", "last"]


def test_an_empty_key_header_does_not_give_way_to_the_message_id(harness: ConsumerHarness) -> None:
    harness.publish({"order": 1}, message_id="m1", headers={KEY_HEADER: ""})
    harness.publish({"order": 2}, message_id="m2")

    harness.consume(
        lambda: {"order": 2} in harness.handled, dead_letter_queue=harness.dead_letter_queue
    )

    (dead_letter,) = harness.drain(harness.dead_letter_queue)
    assert "is empty, which is not a key" in dead_letter.headers[REASON_HEADER]


@pytest.mark.parametrize("message_id", ["m" * 70_000, "\ud800"], ids=["long", "surrogate"])
def test_a_message_id_that_no_record_can_hold_is_dead_lettered(
    idem: Idempotency, server: RedisServer, message_id: str
) -> None:
    harness = ConsumerHarness(idem, (server.url, SHORT_VISIBILITY))  # AMQP has shorter ones
    harness.publish({"order": 1}, "order:1", message_id=message_id)
    harness.publish({"order": 2}, "order:2")

    harness.consume(
        lambda: {"order": 2} in harness.handled, dead_letter_queue=harness.dead_letter_queue
    )

    (dead_letter,) = harness.drain(harness.dead_letter_queue)
    assert dead_letter.headers[REASON_HEADER].startswith("the task's id ")
    assert harness.handled == [{"order": 2}]
    harness.connection.release()
