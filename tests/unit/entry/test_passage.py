"""What a message carries for the gate."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent.entry.passage import Passage, kept, put_back, with_own_key
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.key import Key

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")


def read(headers: Any) -> Passage:
    return Passage.read("shop.charge", headers)


@pytest.mark.parametrize("headers", [None, {}, {"other": 1}], ids=repr)
def test_a_first_message_carries_nothing(headers: Any) -> None:
    assert read(headers) == Passage()


def test_a_message_put_back_carries_its_key_through_any_broker() -> None:
    headers = put_back({"other": 1}, KEY, returns=3, prior=b"\xff" * 16)

    carried = read(json.loads(json.dumps(headers)))

    assert carried == Passage(key=KEY, returns=3, prior=b"\xff" * 16)
    assert headers["other"] == 1


def test_a_message_put_back_keeps_the_key_of_its_call() -> None:
    headers = put_back(with_own_key("shop.charge", None, "req-7"), KEY)

    assert read(headers) == Passage("req-7", key=KEY)


def test_a_retry_keeps_the_key_of_its_call_whatever_headers_it_is_given() -> None:
    headers = with_own_key("shop.charge", {"other": 1}, "req-7")

    assert kept(headers, {"mine": 2}) == {"idempotency_key": "req-7", "mine": 2}
    assert kept(headers, None) == headers
    assert kept(None, {"mine": 2}) == {"mine": 2}
    assert kept(None, None) == {}


@pytest.mark.parametrize("name", ["x-death", "x-first-death-queue", "x-last-death-reason"])
def test_a_message_goes_back_without_its_deaths(name: str) -> None:
    """RabbitMQ may drop one that brings them along, so Celery's own retries do not."""
    headers = {name: "dead", "other": 1}

    assert put_back(headers, KEY).keys() == {"other", "idempotency"}
    assert kept(headers, None) == {"other": 1}


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("key", "carried"),
    [
        ("req-7", "req-7"),
        (7, "7"),
        (0, "0"),
        (Level.HIGH, "3"),
        (UUID(int=1), str(UUID(int=1))),
    ],
)
def test_a_call_may_carry_its_own_key(key: Any, carried: str) -> None:
    given = {"other": 1}

    headers = with_own_key("shop.charge", given, key)

    assert read(headers) == Passage(carried)
    assert given == {"other": 1}


def test_a_call_may_go_ungated() -> None:
    assert read(with_own_key("shop.charge", None, False)) == Passage(ungated=True)
    assert read({**put_back(None, KEY), "idempotency_key": False}).ungated


@pytest.mark.parametrize("key", ["", b"req", True, 1.5, [], ["a"], {}, object], ids=repr)
def test_what_is_no_key_is_refused_at_publish_and_not_shown(key: Any) -> None:
    with pytest.raises(KeyRuleError) as caught:
        with_own_key("shop.charge", None, key)

    assert str(caught.value) == (
        "shop.charge: idempotency_key must be non-empty text, a number, a UUID or False"
    )


def carried(
    key: str = KEY.digest, fingerprint: str = "00" * 8, returns: str = "3", prior: str = "00" * 16
) -> str:
    return f"{key}.{fingerprint}.{returns}.{prior}"


def test_a_header_that_is_whole() -> None:
    assert read({"idempotency": carried()}).returns == 3


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        5,
        [],
        {},
        b"text",
        "text",
        "...",
        carried(key="short"),
        carried(key=KEY.digest + "x"),
        carried(key=KEY.digest + "\n"),
        carried(key="{" * 22),
        carried(key="é" * 22),
        carried(fingerprint="zz"),
        carried(fingerprint="00" * 300),
        carried(returns="often"),
        carried(returns=""),
        carried(returns="-1"),
        carried(returns="٣"),
        carried(returns="9" * 10),
        carried(prior="zz"),
        carried(prior="000"),
        carried() + "\n",
        carried() + ".more",
        carried().rpartition(".")[0],
    ],
    ids=lambda damaged: repr(damaged).replace(KEY.digest, "KEY")[:100],
)
def test_a_damaged_header_counts_as_none(damaged: Any) -> None:
    assert read({"idempotency": damaged}) == Passage()
    assert read({"idempotency": damaged, "idempotency_key": "req-7"}) == Passage("req-7")
