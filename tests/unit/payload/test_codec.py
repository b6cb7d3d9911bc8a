"""Encoding results, errors and steps, and decoding them to what the first caller got."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu.compression import compress, encoders

from celery_idempotent.core.payload import value_codec
from celery_idempotent.core.record import Payload, State
from celery_idempotent.errors import CorruptRecordError, ResultNotStoredError
from celery_idempotent.settings import Settings
from tests.unit.payload.encoding import SERIALIZERS, MemoryStorage, app, decode, encode, make_codec

PLAIN: list[Any] = [
    *(None, 0, 0.0, "", [], {}, False, True, -1, 1.5, 2**60, "Zürich", [1, {"a": [None]}]),
]

RICH = [
    *(datetime(2026, 11, 21, 12, 30, 15, 250), datetime(2026, 11, 21, tzinfo=timezone.utc)),
    *(date(2026, 11, 21), time(12, 30), Decimal("1.10"), UUID(int=7), b"abc", b"\xff\x00"),
    *(math.inf, 2**70, "\0\x1b\u2028"),
]


KEPT: dict[str, list[Any]] = {
    "json": [wrapped for value in RICH for wrapped in (value, [value], {"deep": [value]})],
    "pickle": [*RICH, (1, 2), {1: 2}, {1, 2}, timedelta(1), State.FAILED, ValueError],
}


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_values_keep_their_type(serializer: str) -> None:
    for value in [*PLAIN, *KEPT.get(serializer, [])]:
        decoded = decode(encode(value, serializer))

        assert decoded == value
        assert type(decoded) is type(value)


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize(
    "value",
    [(1, (2, 3)), {"a": (1,)}, "text", 1.5, None, [b"bytes"], AsyncResult("child", app=app)],
    ids=repr,
)
def test_a_replay_equals_what_the_first_caller_got(serializer: str, value: Any) -> None:
    backend_app = Celery("first", backend="cache+memory://", set_as_current=False)
    backend_app.conf.update(result_serializer=serializer, accept_content=[serializer])
    task_id = str(uuid4())
    backend_app.backend.store_result(task_id, value, "SUCCESS")

    first = backend_app.AsyncResult(task_id).get()
    again = decode(encode(value, serializer))

    assert again == first
    assert type(again) is type(first)


@pytest.mark.parametrize("compression", [name.rpartition("-")[2] for name in encoders()])
def test_compressed_data_is_smaller_and_its_format_names_the_compression(compression: str) -> None:
    compression = {"gzip": "gzip", "bz2": "bzip2"}.get(compression, compression)
    value = "text " * 1000

    payload = encode(value, compression=compression)

    assert payload.format == f"json+{compression}"
    assert len(payload.body) < 500
    assert decode(payload) == value


def test_data_below_the_threshold_is_not_compressed() -> None:
    for length, form in [(1021, "json"), (1022, "json+gzip"), (5000, "json+gzip")]:
        value = "x" * length  # and two quotation marks

        payload = encode(value, compression="gzip")

        assert payload.format == form
        assert decode(payload) == value


def test_data_that_does_not_shrink_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_codec, "COMPRESSION_THRESHOLD", 0)
    value = uuid4().hex

    payload = encode(value, compression="gzip")

    assert payload.format == "json"
    assert decode(payload) == value


@pytest.mark.parametrize("compression", ["gzip", "bzip2", "lzma"])
def test_decompression_ends_at_a_limit(compression: str) -> None:
    size, settings = value_codec.MAX_DECODED, Settings(compression=compression)
    for length in (size, size + 1):
        text = "x" * (length - 2)  # and two quotation marks
        is_compressed = value_codec.dump(text, "json", settings).format != "json"
        payload = Payload(f"json+{compression}", compress(f'"{text}"', compression)[0])
        if length == size:
            assert is_compressed
            assert value_codec.load(payload, value_codec.JSON) == text
        else:
            assert not is_compressed
            with pytest.raises(ValueError, match="or larger than 8388608 bytes"):
                value_codec.load(payload, value_codec.JSON)


def test_the_maximum_size_applies_to_compressed_bytes() -> None:
    value = "x" * 98

    assert encode(value, max_size=100).format
    assert not encode(value + "x", max_size=100).format
    assert encode("x" * 10_000, max_size=100, compression="gzip").format


def test_a_value_that_is_too_large_leaves_the_reason() -> None:
    payload = encode("x" * 1000, max_size=100)

    assert not payload.format
    with pytest.raises(ResultNotStoredError) as caught:
        decode(payload)
    assert str(caught.value) == (
        "shop.charge:digest has completed, but its result was not stored: "
        "it is larger than idempotency_max_result_size"
    )


class Explodes:
    def __reduce__(self) -> Any:
        raise RuntimeError("secret")

    __json__ = __reduce__


def contains_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "serializer", "found"),
    [
        (object(), "json", "object"),
        ({1, 2}, "json", "set"),
        (contains_itself(), "json", "list"),
        (Explodes(), "json", f"{__name__}.Explodes"),
        (lambda: 0, "pickle", "function"),
        (Explodes(), "pickle", f"{__name__}.Explodes"),
        (1, "nonesuch", "int"),
        ([1, {"a": (2, {3})}], "json", "set, inside a value of type list"),
        ({"a": {(1, 2): 3}}, "json", "tuple as a key, inside a value of type dict"),
        ([[0] * 1000, [0] * 1000 + [lambda: 0]], "pickle", "function, inside a value of type list"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_an_unserializable_value_leaves_the_reason(value: Any, serializer: str, found: str) -> None:
    payload = encode(value, serializer)

    assert not payload.format
    with pytest.raises(ResultNotStoredError) as caught:
        decode(payload)
    assert str(caught.value).endswith(
        f"not stored: idempotency_serializer {serializer!r} cannot serialize the type {found}"
    )


def test_a_content_type_that_the_app_does_not_accept_is_not_decoded() -> None:
    payload = encode({"a": 1}, "pickle")

    with pytest.raises(CorruptRecordError) as caught:
        decode(payload, codec=make_codec(accept=["json"]))
    assert str(caught.value) == (
        "the result of shop.charge:digest cannot be read as pickle: result_accept_content (or "
        "accept_content) does not accept it"
    )


@pytest.mark.parametrize(
    "payload",
    [
        Payload("json", b'{"a": 1'),
        Payload("json", b"\xff\xfe"),
        Payload("json+gzip", b"not compressed"),
        Payload("json+nonesuch", b"1"),
        Payload("nonesuch", b"1"),
        Payload("pickle", b"\x80\x04garbage"),
        Payload("+", b""),
        Payload("json", b"[" * 100_000),
        Payload("json", b"1" * 5_000),
        Payload("@", b"shop.charge:digest:17"),
        Payload("=other", b"1"),
        Payload("json", b""),
    ],
    ids=lambda payload: payload.format + repr(payload.body)[:6],
)
def test_a_tampered_body_is_corrupt(payload: Payload) -> None:
    storage = MemoryStorage()
    storage.objects["shop.charge:digest:17"] = b"1"

    with pytest.raises(CorruptRecordError, match="shop.charge:digest cannot be read as"):
        decode(payload, codec=make_codec(offload_storage=storage))


def test_a_tampered_reason_is_quoted() -> None:
    with pytest.raises(ResultNotStoredError, match="shop.charge:digest"):
        decode(Payload("", b"\xff\xfe"))
