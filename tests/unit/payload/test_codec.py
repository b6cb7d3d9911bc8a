"""Outcomes as bytes, and back to what the first caller got."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from threading import Lock, get_ident
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult
from celery.utils.serialization import get_pickleable_exception
from kombu.compression import encoders
from kombu.serialization import prepare_accept_content

from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    PoisonedTaskError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.payload.backend_result_codec import BackendResultCodec
from celery_idempotent.payload.cipher import Cipher
from celery_idempotent.payload.codec import (
    DELEGATED,
    NOT_STORED,
    RESULT,
    PayloadCodec,
    ResultCodec,
    step_field,
)
from celery_idempotent.payload.plain_result_codec import PlainResultCodec
from celery_idempotent.record import layout, steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.settings import Settings
from tests.unit.serializers import SERIALIZERS

app = Celery("payloads", backend="cache+memory://", set_as_current=False)

KEY = "shop.charge:digest"


class BaseRecordStore:
    """A depot in memory, which may be full."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.kept: dict[str, bytes] = {}

    def put(self, name: str, data: bytes, seconds: float) -> None:
        if self.full:
            raise OSError("no room")
        self.kept[name] = data
        self.seconds = seconds

    def get(self, name: str) -> bytes | None:
        if self.full:
            raise OSError("no way in")
        return self.kept.get(name)

    def delete(self, name: str) -> None:
        if self.full:
            raise OSError("no way in")
        self.kept.pop(name, None)


def codec(
    accept: Iterable[str] = SERIALIZERS,
    offload_storage: BaseRecordStore | None = None,
    cipher: Cipher | None = None,
) -> PayloadCodec:
    return PayloadCodec(
        BackendResultCodec(app), prepare_accept_content(list(accept)), offload_storage, cipher
    )


def written(
    value: Any,
    serializer: str = "json",
    *,
    compression: str | None = None,
    threshold: int = 0,
    max_size: int = 1_000_000,
    key: str = KEY,
    field: str = RESULT,
    by: PayloadCodec | None = None,
) -> Payload:
    settings = Settings(
        serializer=serializer,
        compression=compression,
        compression_threshold=threshold,
        max_result_size=max_size,
    )
    return (by or codec()).of_result(value, settings, key=key, token=17, field=field)


def error_written(
    error: BaseException, *, by: PayloadCodec | None = None, max_size: int = 1_000_000
) -> Payload:
    settings = Settings(serializer="json", max_result_size=max_size)
    return (by or codec()).of_error(error, settings, key=KEY, token=17)


def record_with(payload: Payload, state: State = State.COMPLETED) -> Record:
    return Record(
        state=state,
        key=KEY,
        task="shop.charge",
        task_id="a",
        worker="w",
        token=1,
        attempt=5,
        format=payload.format,
        body=payload.body,
    )


def read(payload: Payload, by: PayloadCodec | None = None, state: State = State.COMPLETED) -> Any:
    return (by or codec()).decode(record_with(payload, state))


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
    "value",
    [(1, (2, 3)), {"a": (1,)}, "text", 1.5, None, [b"bytes"], AsyncResult("child", app=app)],
    ids=repr,
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


@pytest.mark.parametrize("compression", [name.rpartition("-")[2] for name in encoders()])
def test_compression_saves_room_and_is_named_in_the_format(compression: str) -> None:
    compression = {"gzip": "gzip", "bz2": "bzip2"}.get(compression, compression)
    value = "text " * 1000

    payload = written(value, compression=compression)

    assert payload.format == f"json+{compression}"
    assert len(payload.body) < 500
    assert read(payload) == value


def test_what_is_below_the_threshold_is_not_compressed() -> None:
    for length, form in [(997, "json"), (998, "json+gzip"), (5000, "json+gzip")]:
        value = "x" * length  # and two quotation marks

        payload = written(value, compression="gzip", threshold=1000)

        assert payload.format == form
        assert read(payload) == value


def test_what_compression_makes_larger_is_not_compressed() -> None:
    value = uuid4().hex

    payload = written(value, compression="gzip", threshold=0)

    assert payload.format == "json"
    assert read(payload) == value


def test_the_size_that_counts_is_that_of_the_bytes_to_be_kept() -> None:
    value = "x" * 98

    assert written(value, max_size=100).has_value
    assert not written(value + "x", max_size=100).has_value
    assert written("x" * 10_000, max_size=100, compression="gzip").has_value


def test_a_value_too_large_leaves_the_reason() -> None:
    payload = written("x" * 1000, max_size=100)

    assert not payload.has_value
    with pytest.raises(ResultNotStoredError) as caught:
        read(payload)
    assert str(caught.value) == (
        "shop.charge:digest has completed, but its result was not stored: "
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

    assert not payload.has_value
    with pytest.raises(ResultNotStoredError, match="idempotency_serializer cannot serialize it"):
        read(payload)


def test_a_value_that_was_not_wanted_leaves_the_reason() -> None:
    with pytest.raises(ResultNotStoredError, match="idempotency_store_result is off"):
        read(Payload("", NOT_STORED))


class TestDepot:
    def test_takes_what_is_too_large(self) -> None:
        shelf = BaseRecordStore()
        desk = codec(offload_storage=shelf)

        payload = written("x" * 1000, max_size=100, by=desk)

        assert payload.has_value
        assert len(payload.body) < 100
        assert shelf.kept == {"shop.charge:digest:17": b'"' + b"x" * 1000 + b'"'}
        assert read(payload, by=desk) == "x" * 1000

    def test_is_left_alone_by_what_is_small(self) -> None:
        shelf = BaseRecordStore()

        written("x", by=codec(offload_storage=shelf))

        assert shelf.kept == {}

    def test_that_does_not_take_it_leaves_the_reason(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        desk = codec(offload_storage=BaseRecordStore(full=True))

        payload = written("x" * 1000, max_size=100, by=desk)

        with pytest.raises(ResultNotStoredError, match="offload_backend could not store"):
            read(payload, by=desk)
        assert "shop.charge:digest:17" in caplog.text

    def test_that_no_longer_has_it_is_told(self) -> None:
        payload = written("x" * 1000, max_size=100, by=codec(offload_storage=BaseRecordStore()))

        with pytest.raises(ResultNotStoredError) as caught:
            read(payload, by=codec(offload_storage=BaseRecordStore()))
        assert str(caught.value) == (
            "shop.charge:digest has completed, but its result is no longer in "
            "idempotency_offload_backend: shop.charge:digest:17"
        )

    def test_that_is_not_set_here_is_told(self) -> None:
        payload = written("x" * 1000, max_size=100, by=codec(offload_storage=BaseRecordStore()))

        with pytest.raises(ResultNotStoredError, match="has no idempotency_offload_backend"):
            read(payload)

    def test_that_cannot_be_asked_is_no_reason_to_say_that_it_is_gone(self) -> None:
        shelf = BaseRecordStore()
        payload = written("x" * 1000, max_size=100, by=codec(offload_storage=shelf))
        shelf.full = True

        with pytest.raises(StoreUnavailableError) as caught:
            read(payload, by=codec(offload_storage=shelf))
        assert str(caught.value) == (
            "idempotency_offload_backend cannot be read for the result of shop.charge:digest: "
            "OSError"
        )

    def test_is_told_how_long_to_keep_it(self) -> None:
        shelf = BaseRecordStore()
        settings = Settings(serializer="json", max_result_size=0, result_ttl=60, error_ttl=90)

        desk = codec(offload_storage=shelf)
        desk.of_result(1, settings, key=KEY, token=17)
        assert shelf.seconds == 60
        desk.of_error(ValueError(), settings, key=KEY, token=17)
        assert shelf.seconds == 90

    def test_gives_each_part_a_name_of_its_own(self) -> None:
        shelf = BaseRecordStore()
        desk = codec(offload_storage=shelf)
        parts = [RESULT, step_field("a"), step_field("a/../../b"), step_field("x" * 1000)]
        for field in parts:
            payload = written(field, max_size=0, field=field, by=desk)
            assert desk.load(payload, KEY, field) == field
        error = error_written(ValueError("a"), max_size=0, by=desk)
        assert read(error, by=desk, state=State.FAILED).args == ("a",)

        assert len(shelf.kept) == len(parts) + 1
        assert all(
            re.fullmatch(r"shop\.charge:digest:17(:[\w-]{12})?", name) for name in shelf.kept
        )

    @pytest.mark.parametrize(
        "name",
        [
            "../../etc/passwd",
            "shop.charge:digest:17/../x",
            "shop.charge:digest:",
            "shop.charge:other:17",
            "shop.charge:digest:17:AAAAAAAAAAAA",
            "shop.charge:digest:17\n",
            "shop.charge:digest:١٧",
            "",
        ],
    )
    def test_is_never_asked_for_what_a_record_cannot_have_put_there(self, name: str) -> None:
        shelf = BaseRecordStore()
        shelf.kept[name] = b"1"
        desk = codec(offload_storage=shelf)
        forged = Payload("@json", name.encode())

        with pytest.raises(CorruptRecordError, match="names an object that is not its own"):
            read(forged, by=desk)
        desk.discard(record_with(forged))
        assert shelf.kept == {name: b"1"}

    def test_forgets_what_a_forgotten_record_had_there(self) -> None:
        shelf = BaseRecordStore()
        desk = codec(offload_storage=shelf)
        for number, state in enumerate([State.COMPLETED, State.FAILED, State.STARTED]):
            if state is State.COMPLETED:
                payload = written(1, max_size=0, by=desk)
            elif state is State.FAILED:
                payload = error_written(ValueError(), max_size=0, by=desk)
            else:
                kept = written(1, max_size=0, field=step_field("a"), by=desk)
                payload = Payload("", steps.write("a", *kept) + steps.write("b", "json", b"1"))
            shelf.kept["another"] = b""
            assert len(shelf.kept) == 2, number

            desk.discard(record_with(payload, state))

            assert list(shelf.kept) == ["another"]

    def test_that_cannot_forget_is_no_reason_to_fail(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        shelf = BaseRecordStore()
        desk = codec(offload_storage=shelf)
        payload = written(1, max_size=0, by=desk)
        shelf.full = True

        desk.discard(record_with(payload))
        desk.discard(record_with(Payload("", b"\0\0\0\x09cut"), State.STARTED))
        codec().discard(record_with(payload))

        (message,) = caplog.messages
        assert message == (
            "shop.charge:digest: its result could not be deleted from "
            "idempotency_offload_backend: OSError"
        )


def test_a_content_type_that_the_app_does_not_accept_is_not_read() -> None:
    payload = written({"a": 1}, "pickle")

    with pytest.raises(CorruptRecordError) as caught:
        read(payload, by=codec(accept=["json"]))
    assert str(caught.value) == (
        "the result of shop.charge:digest cannot be decoded as pickle: result_accept_content (or "
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
    ],
    ids=lambda payload: payload.format + repr(payload.body)[:6],
)
def test_a_tampered_body_is_corrupt(payload: Payload) -> None:
    shelf = BaseRecordStore()
    shelf.kept["shop.charge:digest:17"] = b"1"

    with pytest.raises(CorruptRecordError, match="shop.charge:digest cannot be decoded as"):
        read(payload, by=codec(offload_storage=shelf))


def test_a_tampered_reason_is_told_as_it_is() -> None:
    with pytest.raises(ResultNotStoredError, match="shop.charge:digest"):
        read(Payload("", b"\xff\xfe"))


class TestReplacedTask:
    """The outcome is that of the task which took this one's place (`self.replace`)."""

    @staticmethod
    def delegated(task_id: str, seconds: float = 0) -> Record:
        payload = Payload(DELEGATED, layout.write_replacement(1, task_id, b""))
        at_ms = round((datetime.now(timezone.utc).timestamp() - seconds) * 1000)
        return replace(record_with(payload), decode=codec().decode, at_ms=at_ms)

    def test_has_no_result_while_the_other_has_none(self) -> None:
        record = self.delegated(str(uuid4()))

        assert record.result is None
        with pytest.raises(NotReadyError):
            record.outcome()

    def test_has_none_once_the_backend_may_have_forgotten_it(self) -> None:
        day = 86400.0
        with pytest.raises(NotReadyError):
            self.delegated(str(uuid4()), day - 60).outcome()
        with pytest.raises(ResultNotStoredError, match="result_expires"):
            self.delegated(str(uuid4()), day + 60).outcome()

    def test_has_it_for_as_long_as_the_backend(self) -> None:
        task_id = str(uuid4())
        app.backend.store_result(task_id, 42, "SUCCESS")

        assert self.delegated(task_id, 10 * 86400.0).outcome() == 42

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

    @pytest.mark.parametrize("body", [b"", bytes(8), bytes(7) + b"\0\5four"])
    def test_cannot_be_read_if_it_is_cut_short(self, body: bytes) -> None:
        record = replace(record_with(Payload(DELEGATED, body)), decode=codec().decode)

        with pytest.raises(CorruptRecordError):
            record.outcome()

    def test_has_none_where_the_backend_keeps_none(self) -> None:
        without = Celery("without", backend="disabled://", set_as_current=False)
        desk = PayloadCodec(BackendResultCodec(without), prepare_accept_content(["json"]))

        with pytest.raises(ResultNotStoredError, match="the result backend cannot return"):
            desk.decode(self.delegated(str(uuid4())))


class OutOfStockError(Exception):
    """Of a module that every worker has."""


class WordyError(Exception):
    """Makes its text of what it is given."""

    def __init__(self, number: object) -> None:
        super().__init__(f"out of {number}")


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.lock = Lock()


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("secret")

    __str__ = __repr__


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
        # As Celery's tracer hands it to the backend.
        app.backend.store_result(task_id, get_pickleable_exception(error), "FAILURE")
        first = app.AsyncResult(task_id).result

        again = read(error_written(error), state=State.FAILED)

        assert type(again).__qualname__ == type(first).__qualname__
        assert type(again).__module__ == type(first).__module__
        assert again.args == first.args

    def test_one_that_cannot_be_pickled_comes_back_as_celery_has_told_it(self) -> None:
        first = get_pickleable_exception(LockedError("sku-7"))

        again = read(error_written(LockedError("sku-7")), state=State.FAILED)

        assert type(again) is type(first)
        assert str(again) == str(first) == "LockedError('sku-7')"

    def test_known_ones_come_back_as_they_were(self) -> None:
        again = read(error_written(OutOfStockError("sku-7", 5)), state=State.FAILED)

        assert type(again) is OutOfStockError
        assert again.args == ("sku-7", 5)

    @pytest.mark.parametrize(
        "result_codec", [BackendResultCodec(app), PlainResultCodec()], ids=["app", "plain"]
    )
    def test_keep_their_arguments_however_often_they_are_passed_on(
        self, result_codec: ResultCodec
    ) -> None:
        # A duplicate's worker stores again what it was given, for the duplicate's caller.
        desk = PayloadCodec(result_codec, prepare_accept_content(["json"]))
        error: BaseException = WordyError(5)
        for _ in range(3):
            error = read(error_written(error, by=desk), by=desk, state=State.FAILED)

        assert type(error) is WordyError
        assert str(error) == "out of 5"

    def test_are_kept_where_the_result_backend_writes_anything(self) -> None:
        pickling = Celery("pickling", backend="cache+memory://", set_as_current=False)
        pickling.conf.result_serializer = "pickle"
        desk = PayloadCodec(BackendResultCodec(pickling), prepare_accept_content(["pickle"]))

        again = read(error_written(ValueError(object), by=desk), by=desk, state=State.FAILED)

        assert type(again) is ValueError
        assert again.args == ("<class 'object'>",)

    def test_are_written_so_that_nothing_can_be_executed(self) -> None:
        payload = error_written(ValueError(Explodes, "a"))

        assert payload.format == "json"

    def test_are_read_even_where_the_app_accepts_no_json(self) -> None:
        payload = error_written(ValueError("a"))

        assert read(payload, by=codec(accept=["pickle"]), state=State.FAILED).args == ("a",)

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

    @pytest.mark.parametrize("error", [Unspeakable(), ValueError(Unspeakable())], ids=["it", "arg"])
    def test_one_that_cannot_be_written_is_no_reason_to_fail(self, error: Exception) -> None:
        payload = error_written(error)

        again = read(payload, state=State.FAILED)

        assert isinstance(again, (Unspeakable, ValueError, ResultNotStoredError))

    def test_one_that_is_too_large_leaves_the_reason(self) -> None:
        error = read(error_written(ValueError("x" * 1000), max_size=100), state=State.FAILED)

        assert type(error) is ResultNotStoredError
        assert str(error) == (
            "shop.charge:digest has failed, but its error was not stored: "
            "it is larger than idempotency_max_result_size"
        )

    def test_a_poisoned_key_tells_how_often_it_has_begun(self) -> None:
        error = read(Payload("", b"poisoned"), state=State.FAILED)

        assert type(error) is PoisonedTaskError
        assert "shop.charge:digest has begun 5 times" in str(error)
        assert "forget" in str(error)

    def test_one_that_was_not_kept_is_told(self) -> None:
        error = read(Payload("", b""), state=State.FAILED)

        assert type(error) is ResultNotStoredError


def test_on_an_event_loop_only_the_offload_storage_is_used_in_a_thread() -> None:
    threads = []

    class Recording(BaseRecordStore):
        def put(self, name: str, data: bytes, seconds: float) -> None:
            threads.append(get_ident())
            super().put(name, data, seconds)

        def get(self, name: str) -> bytes | None:
            threads.append(get_ident())
            return super().get(name)

        def delete(self, name: str) -> None:
            threads.append(get_ident())
            super().delete(name)

    storage = Recording()
    settings = Settings(serializer="json", max_result_size=10)

    async def use(codec: PayloadCodec) -> None:
        small = await codec.encode_result("x", settings, key=KEY, token=17)
        assert await codec.decode_outcome(record_with(small)) == "x"
        await codec.delete_record_objects(record_with(small))
        assert threads == []

        large = await codec.encode_result("x" * 10, settings, key=KEY, token=17)
        assert await codec.decode_outcome(record_with(large)) == "x" * 10
        step = await codec.encode_step("y" * 10, settings, key=KEY, token=17, name="a")
        assert await codec.decode_step(step, KEY, "a") == "y" * 10
        await codec.delete_record_objects(record_with(large))
        await codec.delete_step_objects(steps.write("a", *step), KEY)
        assert storage.kept == {}
        assert len(threads) == 6

    asyncio.run(use(codec(offload_storage=storage)))
    assert set(threads) == {get_ident()}

    threads.clear()
    asyncio.run(use(codec(offload_storage=storage).for_asyncio()))
    assert get_ident() not in threads
