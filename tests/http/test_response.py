"""What a record holds of a response; and the options of the middleware, checked at its creation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import serialization

from celery_idempotent import CorruptRecordError, Idempotency
from celery_idempotent.contrib import asgi, wsgi
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, anonymous
from celery_idempotent.contrib.http.response import Response
from celery_idempotent.errors import SettingsError

NEVER_STORED = [
    *("Age", "Authentication-Control", "Authentication-Info", "Authorization", "Connection"),
    *("Date", "DPoP-Nonce", "Idempotency-Replayed", "Idempotency-Unprotected", "Keep-Alive"),
    *("Optional-WWW-Authenticate", "Proxy-Authenticate", "Proxy-Authentication-Info"),
    *("Proxy-Authorization", "Proxy-Connection", "Server", "Set-Cookie", "Set-Cookie2", "TE"),
    *("Trailer", "Transfer-Encoding", "Upgrade", "WWW-Authenticate", "X-Auth-Token"),
    *("X-CSRF-Token", "X-XSRF-Token"),
]
STORED = [
    *("Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language"),
    *("Content-Security-Policy", "Content-Type", "ETag", "Last-Modified", "Link", "Location"),
    *("Retry-After", "Vary", "X-Request-Id"),
]

MAX_BYTES = 1024


def stored_names(*headers: tuple[str, str], body: bytes = b"") -> list[str]:
    return [name for name, _ in Response(200, list(headers), body).as_record(MAX_BYTES)["headers"]]


@pytest.mark.parametrize("name", NEVER_STORED)
def test_fields_of_one_connection_or_response_are_not_stored(name: str) -> None:
    assert stored_names((name, "x"), (name.lower(), "x"), ("Link", "x")) == ["Link"]


@pytest.mark.parametrize("name", STORED)
def test_all_other_fields_are_stored(name: str) -> None:
    assert stored_names((name, "x"), (name, "y")) == [name, name]


def test_a_field_that_connection_names_is_not_stored() -> None:
    headers = [("Connection", "close, X-Hop ,Link"), ("x-hop", "1"), ("link", "1"), ("Vary", "1")]
    assert stored_names(*headers) == ["Vary"]


def test_a_content_length_is_stored_if_it_is_right() -> None:
    assert stored_names(("Content-Length", "2"), body=b"ok") == ["Content-Length"]
    assert stored_names(("Content-Length", "3"), body=b"ok") == []


BODIES = st.binary(max_size=200) | st.text(max_size=200).map(str.encode)
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=20)
HEADERS = st.lists(st.tuples(st.sampled_from(["Link", "ETag", "Vary"]), TEXT), max_size=4)


@pytest.mark.parametrize("serializer", ["json", "msgpack", "yaml", "pickle"])
@given(status=st.integers(200, 599), headers=HEADERS, body=BODIES, reason=st.text(max_size=9))
def test_a_response_survives_every_serializer(
    serializer: str, status: int, headers: Any, body: bytes, reason: str
) -> None:
    response = Response(status, headers, body, reason)
    content_type, encoding, data = serialization.dumps(response.as_record(MAX_BYTES), serializer)
    stored = serialization.loads(data, content_type, encoding, accept={content_type})

    assert stored == response.as_record(MAX_BYTES)
    replayed = [*headers, ("Idempotency-Replayed", "true")]
    assert Response.from_record(stored) == Response(status, replayed, body, reason)


def test_a_text_is_readable_in_the_record() -> None:
    assert Response(200, [], b'{"ok": "\xc3\xa9"}').as_record(MAX_BYTES)["text"] == '{"ok": "é"}'


@pytest.mark.parametrize(
    "stored",
    [
        *(None, 1, "text", [], {}, {"status": 200}),
        {"status": "x", "headers": [], "text": "", "reason": ""},
        {"status": 200, "headers": [["a"]], "text": "", "reason": ""},
        {"status": 200, "headers": [], "text": 1, "reason": ""},
        {"status": 200, "headers": [], "base64": "x", "reason": ""},
        {"status": 200, "headers": [], "reason": ""},
    ],
)
def test_a_value_that_is_not_a_response_is_corrupt(stored: Any) -> None:
    with pytest.raises(CorruptRecordError, match="holds no response"):
        Response.from_record(stored)


def test_an_omission_has_no_response() -> None:
    assert Response.from_record({"status": 200, "omitted": True}) is None


ENGINE = Idempotency("redis://127.0.0.1:1", name="options")


@pytest.mark.parametrize("module", [asgi, wsgi])
def test_identity_is_required(module: Any) -> None:
    with pytest.raises(TypeError, match="identity"):
        module.IdempotencyMiddleware(print, idem=ENGINE)


@pytest.mark.parametrize(
    "options",
    [
        *({"idem": None}, {"idem": "redis://"}, {"identity": None}, {"identity": "authorization"}),
        *({"methods": "POST"}, {"methods": None}, {"methods": [1]}, {"methods": [""]}),
        *({"methods": ["POST", method]} for method in ("HEAD", "options", "TRACE", "CONNECT")),
        *({"required": None}, {"required": "POST"}, {"store_response": True}),
        {"authorize_replay": True},
        *({"wait_timeout": -1}, {"wait_timeout": "1"}, {"retry_after": -1}, {"retry_after": 0.5}),
        *({"max_body_bytes": -1}, {"max_body_bytes": "1k"}, {"max_body_bytes": True}),
        *({"max_response_bytes": -1}, {"problem_type_base": None}),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as raised:
        IdempotencyMiddleware(print, **{"idem": ENGINE, "identity": anonymous, **options})

    (message,) = str(raised.value).splitlines()
    assert message.startswith("IdempotencyMiddleware: ")
    assert list(options)[-1] in message


def test_the_engine_needs_a_name_of_its_own() -> None:
    with pytest.raises(SettingsError) as raised:
        IdempotencyMiddleware(print, Idempotency("redis://127.0.0.1:1"), identity=anonymous)

    (message,) = str(raised.value).splitlines()
    assert message.startswith("IdempotencyMiddleware: idem ")
    assert 'name="payments-api"' in message


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="requird"):
        IdempotencyMiddleware(print, ENGINE, identity=anonymous, requird=True)  # type: ignore[call-arg]
