"""The headers in which a message carries its key."""

from __future__ import annotations

import json
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from celery.app.task import Context

from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message import message_headers
from celery_idempotent.core.task.message.message_headers import MessageHeaders, bind
from celery_idempotent.core.task.publish import message_copy
from celery_idempotent.errors import KeyRuleError, SettingsError
from tests.unit.conftest import shop, task_in

KEY = Key("shop.charge", "PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")
ID = "8416e7e8-c045-46d0-9617-5bdf6316b681"
ANOTHER = "0d2f8a0e-9f6c-4a3e-8d61-3b1c6d1f2a77"


def read(headers: Any, task: str = "shop.charge", task_id: str = ID) -> MessageHeaders:
    return MessageHeaders.read(task, task_id, headers)


def with_explicit_key(headers: Any, key: Any, task_id: str = ID) -> dict[str, Any]:
    """Returns the headers of a publish with this key."""
    options = {"headers": headers, "idempotency_key": key}
    options = message_headers.of_options("shop.charge", task_id, options, in_shadow=False)
    return dict(options["headers"])


def for_retry(headers: Any, given: Any, key: Key | None = None) -> dict[str, Any]:
    return message_copy.retry_headers("shop.charge", ID, headers, given, key)


def with_derived_key(headers: Any, key: Key, *, put_back_count: int = 0) -> dict[str, Any]:
    return message_copy.with_derived_key(headers, key, ID, put_back_count=put_back_count)


@pytest.mark.parametrize("headers", [None, {}, {"other": 1}, {"idempotency_key": None}], ids=repr)
def test_a_message_without_the_headers_has_no_key(headers: Any) -> None:
    """A header that is None is as ``idempotency_key=None`` of a call."""
    assert read(headers) == MessageHeaders()


def test_a_message_that_is_run_again_names_the_outcome_that_it_replaces() -> None:
    headers = message_copy.with_derived_key(None, KEY, ID, forgets=2**56 - 1)

    assert read(headers).forgets == 2**56 - 1
    assert read(headers, task_id=ANOTHER) == MessageHeaders()


EXPLICIT = Key("shop.charge", "~PN0MlSPt3FmEwTzQ5dHvBQ", b"8 bytes!")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (with_derived_key({"other": 1}, KEY, put_back_count=3), {"key": KEY, "put_back_count": 3}),
        (
            message_copy.with_derived_key(None, KEY, ID, put_back_count=3, rollback_count=2),
            {"key": KEY, "put_back_count": 3, "rollback_count": 2},
        ),
        (with_derived_key(None, EXPLICIT), {"key": EXPLICIT}),
        (
            with_derived_key(with_explicit_key(None, "req-7"), KEY),
            {"explicit_key": "req-7", "key": KEY},
        ),
    ],
    ids=["requeued", "rolled back", "explicit key", "explicit and derived key"],
)
def test_a_message_put_back_has_its_key(headers: dict[str, Any], expected: dict[str, Any]) -> None:
    parsed = read(json.loads(json.dumps(headers)))

    assert parsed == MessageHeaders(**expected)
    assert (parsed.key or KEY).explicit is (parsed.key == EXPLICIT)


def test_a_retry_keeps_the_explicit_key_whatever_its_headers_are() -> None:
    headers = with_explicit_key({"other": 1}, "req-7")

    retried = for_retry(headers, {"mine": 2})
    assert (read(retried), retried["mine"]) == (MessageHeaders("req-7"), 2)
    assert "other" not in retried
    assert for_retry(headers, None) == headers
    assert for_retry(None, {"mine": 2}) == {"mine": 2}
    assert for_retry(None, None) == {}


@pytest.mark.parametrize("name", ["x-death", "x-first-death-queue", "x-last-death-reason"])
def test_a_message_is_published_again_without_its_dead_letter_headers(name: str) -> None:
    """RabbitMQ may drop a message that has them, so Celery's own retries leave them out."""
    headers = {name: "dead", "other": 1}

    assert with_derived_key(headers, KEY).keys() == {"other", "idempotency"}
    assert for_retry(headers, None) == {"other": 1}


class Level(IntEnum):
    HIGH = 3


class Name(str, Enum):
    ACME = "acme"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("req-7", "req-7"),
        (7, "7"),
        (0, "0"),
        (Level.HIGH, "3"),
        (UUID(int=1), str(UUID(int=1))),
        ("x" * 255, "x" * 255),
        (Name.ACME, "acme"),
        (("acme", "req-7"), ["acme", "req-7"]),
        (["acme", 7, UUID(int=1), Name.ACME], ["acme", "7", str(UUID(int=1)), "acme"]),
        (("a" * 100, "b" * 155), ["a" * 100, "b" * 155]),
    ],
)
def test_a_call_may_have_an_explicit_key(key: Any, expected: str | list[str]) -> None:
    given = {"other": 1}

    headers = with_explicit_key(given, key)

    assert read(headers) == MessageHeaders(expected)
    assert read(json.loads(json.dumps(headers))) == MessageHeaders(expected)
    assert bind("shop.charge", ID, {"idempotency_key": key}) == {
        name: value for name, value in headers.items() if name != "other"
    }
    assert given == {"other": 1}


def test_a_call_may_be_unprotected() -> None:
    assert read(with_explicit_key(None, False)) == MessageHeaders(explicit_key=False)
    assert read({**with_derived_key(None, KEY), "idempotency_key": False}).explicit_key is False


INVALID = [
    *("", b"req", True, 1.5, {}, {"req": 7}, {"req"}, object),
    *([], (), [""], ["acme", ""], ["acme", None], ["acme", True], ["acme", 1.5], ["acme", ["req"]]),
]


_WRONG = "must be non-empty text, an integer, a UUID or a tuple of these, or False"
_LONG = "has 300 characters, and 255 are allowed: pass a digest of it"


@pytest.mark.parametrize(
    ("key", "reason"),
    [*((key, _WRONG) for key in INVALID), ("secret" * 50, _LONG), (["secret" * 25] * 2, _LONG)],
    ids=repr,
)
def test_an_invalid_explicit_key_is_rejected_and_not_shown(key: Any, reason: str) -> None:
    header = {"idempotency_key": key}
    for use in (
        lambda: with_explicit_key(None, key),
        lambda: read(header),
        lambda: bind("shop.charge", ID, header),
    ):
        with pytest.raises(KeyRuleError) as caught:
            use()

        assert str(caught.value) == f"shop.charge: idempotency_key {reason}"


@pytest.mark.parametrize("given", [None, {"mine": 2}], ids=repr)
def test_a_retry_carries_the_derived_key(given: Any) -> None:
    assert read(for_retry({"other": 1}, given, KEY)).key == KEY
    assert read(for_retry(with_derived_key({"other": 1}, KEY), given)).key == KEY


def test_a_retry_does_not_wait_as_its_message_did() -> None:
    """Also with the headers of the message: otherwise it would be woken before its countdown.

    Nor does anything else to which a body forwards its headers.
    """
    waits = message_headers.Waits(1, 17, ANOTHER)
    fields = {"put_back_count": 3, "rollback_count": 2, "forgets": 9, "waits": waits}
    headers = message_copy.with_derived_key(None, KEY, ID, **fields)
    assert read(headers).waits == waits

    for given in (None, {**headers, "mine": 2}):
        assert read(for_retry(headers, given)) == MessageHeaders(key=KEY)
    assert read(bind("shop.charge", ID, headers)) == MessageHeaders(key=KEY)


def test_a_retry_cannot_change_the_explicit_key() -> None:
    headers = with_explicit_key(None, ("acme", "req-7"))

    assert read(for_retry(headers, {"idempotency_key": ["acme", "req-7"]})).explicit_key
    for given in (headers, None):
        with pytest.raises(KeyRuleError, match="a retry keeps the key of its call"):
            for_retry(given, {"idempotency_key": "req-8"})
    with pytest.raises(KeyRuleError, match="a retry keeps the key of its call"):
        task_in(shop()).signature_from_request(Context(id=ID), headers={"idempotency_key": "req-8"})


class TestAnotherMessagesHeaders:
    """Headers forwarded to a child: ``child.apply_async(…, headers=self.request.headers)``."""

    @pytest.fixture(
        params=[
            with_explicit_key({"other": 1}, "req-7"),
            with_explicit_key({"other": 1}, False),
            with_explicit_key({"other": 1}, ("acme", "req-7")),
            with_derived_key({"other": 1}, KEY, put_back_count=3),
            with_derived_key(with_explicit_key({"other": 1}, "req-7"), KEY),
            bind("shop.charge", ID, {"other": 1, "idempotency_key": "req-7"}),
        ],
        ids=[
            *("explicit key", "unprotected", "explicit tuple", "derived key"),
            *("derived and explicit key", "by name"),
        ],
    )
    def headers(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return dict(request.param)

    @pytest.mark.parametrize(
        ("task", "task_id"),
        [("shop.pack", ANOTHER), ("shop.charge", ANOTHER), ("shop.pack", ID)],
        ids=["another task", "another call of the task", "another task under the id"],
    )
    def test_are_ignored(self, headers: dict[str, Any], task: str, task_id: str) -> None:
        assert read(headers, task, task_id) == MessageHeaders()
        assert bind(task, task_id, headers) == {"other": 1}
        assert read(headers) != MessageHeaders()

    def test_are_replaced_by_those_of_the_message(self, headers: dict[str, Any]) -> None:
        again = message_copy.with_derived_key(headers, KEY, ANOTHER)
        assert read(again, task_id=ANOTHER) == MessageHeaders(key=KEY)
        assert message_copy.retry_headers("shop.charge", ANOTHER, headers, None) == {"other": 1}

        same = with_explicit_key(headers, "req-7", ANOTHER)
        assert read(same, task_id=ANOTHER) == MessageHeaders("req-7")
        other = {**headers, "idempotency_key": "req-8"}
        for given in (other, bind("shop.charge", ANOTHER, other)):
            assert read(given, task_id=ANOTHER) == MessageHeaders("req-8")
        later = {**headers, "idempotency": headers["idempotency"] + ".more"}
        assert read(later, task_id=ANOTHER) == MessageHeaders()


def test_binding_bound_headers_changes_nothing() -> None:
    headers = with_derived_key(with_explicit_key({"other": 1}, "req-7"), KEY)

    assert bind("shop.charge", ID, headers) == headers
    assert bind("shop.charge", ID, None) == {}


def test_a_header_of_the_first_version_is_ignored() -> None:
    """That version did not bind it to a message."""
    first = {"idempotency": f"{KEY.digest}.{'00' * 8}.3."}

    assert read(first) == MessageHeaders()
    assert read({**first, "idempotency_key": "req-7"}) == MessageHeaders("req-7")
    assert read({**first, "idempotency_key": False}) == MessageHeaders(explicit_key=False)
    assert bind("shop.charge", ID, first) == {}


def header_text(key: str = KEY.digest, fingerprint: str = "00" * 8, count: str = "3") -> str:
    binding = with_explicit_key(None, "req-7")["idempotency"]
    return f"{binding}.{key}.{fingerprint}.{count}"


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, 5, [], {}, b"text", "text", "..."),
        *(header_text(key=KEY.digest + more) for more in ("x", "\n")),
        *(header_text(key=key) for key in ("short", "{" * 22, "é" * 22)),
        *(header_text(fingerprint="zz"), header_text(fingerprint="00" * 300)),
        *(header_text(count=text) for text in ("often", "", "-1", "٣", "9" * 10)),
        *(header_text() + "\n", header_text() + ".more", header_text().rpartition(".")[0]),
        *(header_text()[1:], header_text().partition(".")[2]),
        "é" + header_text()[1:],
    ],
    ids=lambda damaged: repr(damaged).replace(KEY.digest, "KEY")[:100],
)
def test_a_damaged_header_is_ignored(damaged: Any) -> None:
    assert read({"idempotency": header_text()}).put_back_count == 3, "the intact one"
    assert read({"idempotency": damaged}) == MessageHeaders()
    assert read({"idempotency": damaged, "idempotency_key": "req-7"}) == MessageHeaders("req-7")


@pytest.mark.parametrize(
    ("value", "seconds"), [(600, 600), (1.5, 1.5), ("600", 600.0), ("2.25", 2.25)], ids=repr
)
def test_a_retention_set_by_name_belongs_to_the_message(value: Any, seconds: float) -> None:
    assert read({"idempotency_result_ttl": value}).result_ttl == seconds


def test_a_bound_retention_survives_everything_but_another_message() -> None:
    bound = bind("shop.charge", ID, {"idempotency_result_ttl": 600, "other": 1})
    requeued = with_derived_key(json.loads(json.dumps(bound)), KEY, put_back_count=1)

    for headers in (bound, requeued, for_retry(requeued, None), for_retry(requeued, {"new": 1})):
        assert read(headers).result_ttl == 600
        assert read(headers, task_id=ANOTHER).result_ttl is None
        assert read(headers, task="shop.refund").result_ttl is None
        assert "idempotency_result_ttl" not in bind("shop.refund", ID, headers)


def test_a_retention_set_on_forwarded_headers_does_not_revive_their_key() -> None:
    headers = with_explicit_key({"idempotency_result_ttl": 600}, "req-7")

    child = bind("shop.charge", ANOTHER, {**headers, "idempotency_result_ttl": 30})

    assert read(child, task_id=ANOTHER) == MessageHeaders(result_ttl=30)


@pytest.mark.parametrize(
    "value",
    [
        *(0, 0.9, -1, True, float("nan"), float("inf"), 10**12),
        *("0", "-5", "1e3", "", "x", "9" * 10**5, "600 short", [600], {"ttl": 1}, b"600"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_retention_that_cannot_be_used_is_refused_in_one_line(value: Any) -> None:
    for refuse in (read, lambda headers: bind("shop.charge", ID, headers)):
        with pytest.raises(SettingsError) as caught:
            refuse({"idempotency_result_ttl": value})
        text = str(caught.value)
        assert text.startswith("shop.charge: idempotency_result_ttl must be seconds or a timedelta")
        assert "\n" not in text
        assert len(text) < 200


@pytest.mark.parametrize(
    "headers", [{"idempotency_key": ""}, {"idempotency_result_ttl": "x"}], ids=repr
)
def test_a_header_that_cannot_be_used_is_replaced_by_a_finding_in_shadow(headers: Any) -> None:
    """The publish of a call in shadow never fails because of it."""
    options = message_headers.of_options("shop.charge", ID, {"headers": headers}, in_shadow=True)

    assert message_headers.finding_of(ID, options["headers"]) == message_headers.REFUSED
