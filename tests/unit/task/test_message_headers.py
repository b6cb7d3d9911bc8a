"""What a message carries for the gate."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.key import Key
from celery_idempotent.task import message_headers
from celery_idempotent.task.message_headers import MessageHeaders, bound

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")


ID = "8416e7e8-c045-46d0-9617-5bdf6316b681"
ANOTHER = "0d2f8a0e-9f6c-4a3e-8d61-3b1c6d1f2a77"


def read(headers: Any, task: str = "shop.charge", task_id: str = ID) -> MessageHeaders:
    return MessageHeaders.read(task, task_id, headers)


def with_own_key(headers: Any, key: Any) -> dict[str, Any]:
    return message_headers.with_own_key("shop.charge", ID, headers, key)


def kept(headers: Any, given: Any) -> dict[str, Any]:
    return message_headers.kept("shop.charge", ID, headers, given)


def put_back(
    headers: Any, key: Key, *, requeue_count: int = 0, unanswered_ids: bytes = b""
) -> dict[str, Any]:
    return message_headers.put_back(headers, key, ID, requeue_count, unanswered_ids)


@pytest.mark.parametrize("headers", [None, {}, {"other": 1}], ids=repr)
def test_a_first_message_carries_nothing(headers: Any) -> None:
    assert read(headers) == MessageHeaders()


def test_a_message_put_back_carries_its_key_through_any_broker() -> None:
    headers = put_back({"other": 1}, KEY, requeue_count=3, unanswered_ids=b"\xff" * 16)

    headers_read = read(json.loads(json.dumps(headers)))

    assert headers_read == MessageHeaders(key=KEY, requeue_count=3, unanswered_ids=b"\xff" * 16)
    assert headers["other"] == 1


def test_a_message_put_back_keeps_the_key_of_its_call() -> None:
    headers = put_back(with_own_key(None, "req-7"), KEY)

    assert read(headers) == MessageHeaders("req-7", key=KEY)


def test_a_retry_keeps_the_key_of_its_call_whatever_headers_it_is_given() -> None:
    headers = with_own_key({"other": 1}, "req-7")

    given = kept(headers, {"mine": 2})
    assert (read(given), given["mine"]) == (MessageHeaders("req-7"), 2)
    assert "other" not in given
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
    ("key", "headers_read"),
    [
        ("req-7", "req-7"),
        (7, "7"),
        (0, "0"),
        (Level.HIGH, "3"),
        (UUID(int=1), str(UUID(int=1))),
    ],
)
def test_a_call_may_carry_its_own_key(key: Any, headers_read: str) -> None:
    given = {"other": 1}

    headers = with_own_key(given, key)

    assert read(headers) == MessageHeaders(headers_read)
    assert given == {"other": 1}


def test_a_call_may_go_ungated() -> None:
    assert read(with_own_key(None, False)) == MessageHeaders(unprotected=True)
    assert read({**put_back(None, KEY), "idempotency_key": False}).unprotected


@pytest.mark.parametrize("key", ["", b"req", True, 1.5, [], ["a"], {}, object], ids=repr)
def test_what_is_no_key_is_refused_at_publish_and_not_shown(key: Any) -> None:
    with pytest.raises(KeyRuleError) as caught:
        with_own_key(None, key)

    assert str(caught.value) == (
        "shop.charge: idempotency_key must be non-empty text, a number, a UUID or False"
    )


class TestAnotherMessagesHeaders:
    """Forwarded whole: ``child.apply_async(…, headers=self.request.headers)``."""

    @pytest.fixture(
        params=[
            with_own_key({"other": 1}, "req-7"),
            with_own_key({"other": 1}, False),
            put_back({"other": 1}, KEY, requeue_count=3, unanswered_ids=b"\xff" * 16),
            put_back(with_own_key({"other": 1}, "req-7"), KEY),
            bound("shop.charge", ID, {"other": 1, "idempotency_key": "req-7"}),
        ],
        ids=["own key", "ungated", "put back", "put back with its own key", "by name"],
    )
    def headers(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return dict(request.param)

    @pytest.mark.parametrize(
        ("task", "task_id"),
        [("shop.pack", ANOTHER), ("shop.charge", ANOTHER), ("shop.pack", ID)],
        ids=["another task", "another call of the task", "another task under the id"],
    )
    def test_say_nothing(self, headers: dict[str, Any], task: str, task_id: str) -> None:
        assert read(headers, task, task_id) == MessageHeaders()
        assert bound(task, task_id, headers) == {"other": 1}
        assert read(headers) != MessageHeaders()

    def test_say_nothing_in_what_goes_back(self, headers: dict[str, Any]) -> None:
        back = message_headers.put_back(headers, KEY, ANOTHER)

        assert read(back, task_id=ANOTHER) == MessageHeaders(key=KEY)
        assert message_headers.kept("shop.charge", ANOTHER, headers, None) == {"other": 1}

    def test_may_be_given_a_key(self, headers: dict[str, Any]) -> None:
        headers["idempotency_key"] = "req-8"

        assert read(headers, task_id=ANOTHER) == MessageHeaders("req-8")
        assert read(bound("shop.charge", ANOTHER, headers), task_id=ANOTHER) == MessageHeaders(
            "req-8"
        )

    def test_may_be_given_the_same_key(self, headers: dict[str, Any]) -> None:
        given = message_headers.with_own_key("shop.charge", ANOTHER, headers, "req-7")

        assert read(given, task_id=ANOTHER) == MessageHeaders("req-7")

    def test_may_come_from_a_later_version(self, headers: dict[str, Any]) -> None:
        headers["idempotency"] += ".more"

        assert read(headers, task_id=ANOTHER) == MessageHeaders()


def test_what_is_bound_already_stays_as_it_is() -> None:
    headers = put_back(
        with_own_key({"other": 1}, "req-7"), KEY, requeue_count=2, unanswered_ids=b"\xff" * 16
    )

    assert bound("shop.charge", ID, headers) == headers
    assert bound("shop.charge", ID, None) == {}


def test_a_header_of_the_first_version_counts_as_none() -> None:
    """It was bound to no message."""
    first = {"idempotency": f"{KEY.digest}.{'00' * 8}.3."}

    assert read(first) == MessageHeaders()
    assert read({**first, "idempotency_key": "req-7"}) == MessageHeaders("req-7")
    assert read({**first, "idempotency_key": False}) == MessageHeaders(unprotected=True)
    assert bound("shop.charge", ID, first) == {}


BINDING = with_own_key(None, "req-7")["idempotency"]


def headers_read(
    key: str = KEY.digest,
    fingerprint: str = "00" * 8,
    requeue_count: str = "3",
    unanswered_ids: str = "00" * 16,
) -> str:
    return f"{BINDING}.{key}.{fingerprint}.{requeue_count}.{unanswered_ids}"


def test_a_header_that_is_whole() -> None:
    assert read({"idempotency": headers_read()}).requeue_count == 3


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
        headers_read(key="short"),
        headers_read(key=KEY.digest + "x"),
        headers_read(key=KEY.digest + "\n"),
        headers_read(key="{" * 22),
        headers_read(key="é" * 22),
        headers_read(fingerprint="zz"),
        headers_read(fingerprint="00" * 300),
        headers_read(requeue_count="often"),
        headers_read(requeue_count=""),
        headers_read(requeue_count="-1"),
        headers_read(requeue_count="٣"),
        headers_read(requeue_count="9" * 10),
        headers_read(unanswered_ids="zz"),
        headers_read(unanswered_ids="000"),
        headers_read() + "\n",
        headers_read() + ".more",
        headers_read().rpartition(".")[0],
        headers_read()[1:],
        headers_read().partition(".")[2],
        "é" + headers_read()[1:],
    ],
    ids=lambda damaged: repr(damaged).replace(KEY.digest, "KEY")[:100],
)
def test_a_damaged_header_counts_as_none(damaged: Any) -> None:
    assert read({"idempotency": damaged}) == MessageHeaders()
    assert read({"idempotency": damaged, "idempotency_key": "req-7"}) == MessageHeaders("req-7")
