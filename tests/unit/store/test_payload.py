"""Outcomes as bytes, and back to what the first caller got."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu.compression import encoders
from kombu.serialization import prepare_accept_content

from celery_idempotent.entry.dialect import BackendDialect
from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    PoisonedTaskError,
    ResultNotStoredError,
)
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.payload import DELEGATED, NOT_WANTED, Payload, Payloads
from tests.unit.serializers import SERIALIZERS

app = Celery("payloads", backend="cache+memory://", set_as_current=False)


class Shelf:
    """A depot in memory, which may be full."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        if self.full:
            raise OSError("no room")
        self.kept[name] = data

    def get(self, name: str) -> bytes | None:
        return self.kept.get(name)


def payloads(accept: Iterable[str] = SERIALIZERS, depot: Shelf | None = None) -> Payloads:
    return Payloads(BackendDialect(app), prepare_accept_content(list(accept)), depot)


def written(
    value: Any,
    serializer: str = "json",
    *,
    compression: str | None = None,
    max_size: int = 1_000_000,
    by: Payloads | None = None,
) -> Payload:
    return (by or payloads()).of_result(
        value,
        serializer=serializer,
        compression=compression,
        max_size=max_size,
        name="shop.charge:digest:17",
    )


def record_with(payload: Payload, state: State = State.COMPLETED) -> Record:
    return Record(
        state=state,
        key="shop.charge:digest",
        task="shop.charge",
        task_id="a",
        worker="w",
        token=1,
        attempt=5,
        format=payload.format,
        body=payload.body,
    )


def read(payload: Payload, by: Payloads | None = None, state: State = State.COMPLETED) -> Any:
    return (by or payloads()).decode(record_with(payload, state))


PLAIN: list[Any] = [
    None,
    0,
    0.0,
    "",
    [],
    {},
    False,
    True,
    -1,
    1.5,
    "Zürich",
    [1, {"a": [None]}],
    2**60,
]
RICH = [
    datetime(2026, 11, 21, 12, 30, 15, 250),
    datetime(2026, 11, 21, tzinfo=timezone.utc),
    date(2026, 11, 21),
    time(12, 30),
    Decimal("1.10"),
    UUID(int=7),
    b"abc",
    b"\xff\x00",
    math.inf,
    2**70,
    "\0\x1b\u2028",
]


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_plain_values_come_back_with_their_type(serializer: str) -> None:
    for value in PLAIN:
        back = read(written(value, serializer))

        assert back == value
        assert type(back) is type(value)


@pytest.mark.parametrize("value", RICH, ids=repr)
def test_json_brings_rich_values_back_with_their_type(value: Any) -> None:
    for wrapped in (value, [value], {"deep": [value]}):
        assert read(written(wrapped)) == wrapped
    assert type(read(written(value))) is type(value)


def test_pickle_brings_anything_back() -> None:
    for value in [*RICH, (1, 2), {1: 2}, {1, 2}, timedelta(1), State.FAILED, ValueError]:
        back = read(written(value, "pickle"))

        assert back == value
        assert type(back) is type(value)


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize(
    "value", [(1, (2, 3)), {"a": (1,)}, "text", 1.5, None, [b"bytes"]], ids=repr
)
def test_a_replay_is_what_the_first_caller_got(serializer: str, value: Any) -> None:
    backend_app = Celery(
        "first",
        backend="cache+memory://",
        result_serializer=serializer,
        accept_content=[serializer],
        set_as_current=False,
    )
    task_id = str(uuid4())
    backend_app.backend.store_result(task_id, value, "SUCCESS")

    first = backend_app.AsyncResult(task_id).get()
    again = read(written(value, serializer))

    assert again == first
    assert type(again) is type(first)


def test_a_result_object_is_told_as_celery_tells_it() -> None:
    task_id = str(uuid4())
    result = AsyncResult("child", app=app)
    app.backend.store_result(task_id, result, "SUCCESS")

    assert read(written(result)) == app.AsyncResult(task_id).get()


@pytest.mark.parametrize("compression", [name.rpartition("-")[2] for name in encoders()])
def test_compression_saves_room_and_is_named_in_the_format(compression: str) -> None:
    compression = {"gzip": "gzip", "bz2": "bzip2"}.get(compression, compression)
    value = "text " * 1000

    payload = written(value, compression=compression)

    assert payload.format == f"json+{compression}"
    assert len(payload.body) < 500
    assert read(payload) == value


def test_the_size_that_counts_is_that_of_the_bytes_to_be_kept() -> None:
    value = "x" * 98

    assert written(value, max_size=100).kept
    assert not written(value + "x", max_size=100).kept
    assert written("x" * 10_000, max_size=100, compression="gzip").kept


def test_a_value_too_large_leaves_the_reason() -> None:
    payload = written("x" * 1000, max_size=100)

    assert not payload.kept
    with pytest.raises(ResultNotStoredError) as caught:
        read(payload)
    assert str(caught.value) == (
        "shop.charge:digest has completed, but its result was not kept: "
        "it is larger than idempotency_max_result_size"
    )


class Explodes:
    def __reduce__(self) -> Any:
        raise RuntimeError("secret")

    def __json__(self) -> Any:
        raise RuntimeError("secret")


def contains_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "serializer"),
    [
        (object(), "json"),
        ({1, 2}, "json"),
        (contains_itself(), "json"),
        (Explodes(), "json"),
        (lambda: 0, "pickle"),
        (Explodes(), "pickle"),
        (1, "nonesuch"),
    ],
    ids=["object", "set", "contains-itself", "explodes", "lambda", "explodes-too", "nonesuch"],
)
def test_a_value_that_cannot_be_written_leaves_the_reason(value: Any, serializer: str) -> None:
    payload = written(value, serializer)

    assert not payload.kept
    with pytest.raises(ResultNotStoredError, match="idempotency_serializer cannot write it"):
        read(payload)


def test_a_value_that_was_not_wanted_leaves_the_reason() -> None:
    with pytest.raises(ResultNotStoredError, match="idempotency_store_result is off"):
        read(Payload("", NOT_WANTED))


class TestDepot:
    def test_takes_what_is_too_large(self) -> None:
        shelf = Shelf()
        desk = payloads(depot=shelf)

        payload = written("x" * 1000, max_size=100, by=desk)

        assert payload.kept
        assert len(payload.body) < 100
        assert shelf.kept == {"shop.charge:digest:17": b'"' + b"x" * 1000 + b'"'}
        assert read(payload, by=desk) == "x" * 1000

    def test_is_left_alone_by_what_is_small(self) -> None:
        shelf = Shelf()

        written("x", by=payloads(depot=shelf))

        assert shelf.kept == {}

    def test_that_does_not_take_it_leaves_the_reason(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        desk = payloads(depot=Shelf(full=True))

        payload = written("x" * 1000, max_size=100, by=desk)

        with pytest.raises(ResultNotStoredError, match="idempotency_offload_backend did not take"):
            read(payload, by=desk)
        assert "shop.charge:digest:17" in caplog.text

    @pytest.mark.parametrize("reader", [payloads(depot=Shelf()), payloads()], ids=["empty", "none"])
    def test_that_no_longer_has_it_is_told(self, reader: Payloads) -> None:
        payload = written("x" * 1000, max_size=100, by=payloads(depot=Shelf()))

        with pytest.raises(ResultNotStoredError, match="not in idempotency_offload_backend"):
            read(payload, by=reader)


def test_a_content_type_that_the_app_does_not_accept_is_not_read() -> None:
    payload = written({"a": 1}, "pickle")

    with pytest.raises(CorruptRecordError, match="shop.charge:digest cannot be read as pickle"):
        read(payload, by=payloads(accept=["json"]))


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
    ],
    ids=lambda payload: payload.format + repr(payload.body)[:6],
)
def test_a_tampered_body_is_corrupt(payload: Payload) -> None:
    with pytest.raises(CorruptRecordError, match="shop.charge:digest cannot be read as"):
        read(payload)


def test_a_tampered_reason_is_told_as_it_is() -> None:
    with pytest.raises(ResultNotStoredError, match="shop.charge:digest"):
        read(Payload("", b"\xff\xfe"))


class TestReplacedTask:
    """The outcome is that of the task which took this one's place (`self.replace`)."""

    @staticmethod
    def delegated(task_id: str) -> Record:
        return replace(record_with(Payload(DELEGATED, task_id.encode())), decode=payloads().decode)

    def test_has_no_result_while_the_other_has_none(self) -> None:
        record = self.delegated(str(uuid4()))

        assert record.result is None
        with pytest.raises(NotReadyError):
            record.outcome()

    def test_has_the_others_result(self) -> None:
        for value in (42, None, ""):
            task_id = str(uuid4())
            app.backend.store_result(task_id, value, "SUCCESS")

            assert self.delegated(task_id).outcome() == value

    def test_has_the_others_error(self) -> None:
        task_id = str(uuid4())
        app.backend.store_result(task_id, OutOfStockError("sku-7"), "FAILURE")

        with pytest.raises(OutOfStockError, match="sku-7"):
            self.delegated(task_id).outcome()

    def test_has_none_where_the_backend_keeps_none(self) -> None:
        without = Celery("without", backend="disabled://", set_as_current=False)
        desk = Payloads(BackendDialect(without), prepare_accept_content(["json"]))

        with pytest.raises(ResultNotStoredError, match="the result backend cannot tell"):
            desk.decode(self.delegated(str(uuid4())))


class OutOfStockError(Exception):
    """Of a module that every worker has."""


class TestErrors:
    @pytest.mark.parametrize(
        "error",
        [
            ValueError("a", 1),
            KeyError("x"),
            ValueError(),
            OutOfStockError("sku-7", Decimal("1.5")),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "reason"),
            SystemExit(3),
            type("MadeHere", (ValueError,), {})("message"),
            ValueError(object),
        ],
        ids=lambda error: type(error).__name__ + str(len(error.args)),
    )
    def test_come_back_as_async_result_raises_them(self, error: BaseException) -> None:
        task_id = str(uuid4())
        app.backend.store_result(task_id, error, "FAILURE")
        first = app.AsyncResult(task_id).result

        again = read(payloads().of_error(error), state=State.FAILED)

        assert type(again).__qualname__ == type(first).__qualname__
        assert type(again).__module__ == type(first).__module__
        assert again.args == first.args

    def test_known_ones_come_back_as_they_were(self) -> None:
        again = read(payloads().of_error(OutOfStockError("sku-7", 5)), state=State.FAILED)

        assert type(again) is OutOfStockError
        assert again.args == ("sku-7", 5)

    def test_are_written_so_that_nothing_can_be_executed(self) -> None:
        payload = payloads().of_error(ValueError(Explodes, "a"))

        assert payload.format == "json"

    def test_are_read_even_where_the_app_accepts_no_json(self) -> None:
        payload = payloads().of_error(ValueError("a"))

        assert read(payload, by=payloads(accept=["pickle"]), state=State.FAILED).args == ("a",)

    def test_are_never_unpickled(self) -> None:
        with pytest.raises(CorruptRecordError):
            read(written(ValueError("a"), "pickle"), state=State.FAILED)

    @pytest.mark.parametrize(
        "body",
        [
            b"5",
            b"[]",
            b"null",
            b"{}",
            b'"text"',
            b'{"exc_type": "system", "exc_module": "os", "exc_message": ["true"]}',
            b'{"exc_type": 5, "exc_module": [], "exc_message": {}}',
            b'{"exc_module": "os"}',
        ],
    )
    def test_a_tampered_one_is_corrupt(self, body: bytes) -> None:
        with pytest.raises(CorruptRecordError, match="shop.charge:digest"):
            read(Payload("json", body), state=State.FAILED)

    def test_a_poisoned_key_tells_how_often_it_has_begun(self) -> None:
        error = read(Payload("", b"poisoned"), state=State.FAILED)

        assert type(error) is PoisonedTaskError
        assert "shop.charge:digest has begun 5 times" in str(error)
        assert "forget" in str(error)

    def test_one_that_was_not_kept_is_told(self) -> None:
        error = read(Payload("", b""), state=State.FAILED)

        assert type(error) is ResultNotStoredError
