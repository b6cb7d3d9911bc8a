"""Errors, and results of tasks that were replaced: decoded as the first caller got them."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from threading import Lock
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate, WorkerShutdown, WorkerTerminate
from celery.utils.serialization import get_pickleable_exception
from kombu.serialization import prepare_accept_content

from celery_idempotent.core.payload.codec import DELEGATED, PayloadCodec
from celery_idempotent.core.payload.result_codec import ResultCodec
from celery_idempotent.core.record import Payload, Record, State, layout
from celery_idempotent.errors import (
    CorruptRecordError,
    NotReadyError,
    PoisonedTaskError,
    ResultNotStoredError,
)
from tests.unit.payload.encoding import (
    OutOfStockError,
    app,
    decode,
    encode,
    encode_error,
    make_codec,
    record_with,
)


class TestReplacedTask:
    """The result of the task that replaced this one (`self.replace`)."""

    @staticmethod
    def delegated(task_id: str, seconds: float = 0) -> Record:
        payload = Payload(DELEGATED, layout.write_task_id(task_id))
        at_ms = round((datetime.now(timezone.utc).timestamp() - seconds) * 1000)
        return replace(record_with(payload), decode=make_codec().decode, at_ms=at_ms)

    def test_is_not_ready_while_that_task_runs(self) -> None:
        record = self.delegated(str(uuid4()))

        assert record.result is None
        with pytest.raises(NotReadyError):
            record.outcome()

    def test_is_not_stored_once_the_backend_may_have_deleted_it(self) -> None:
        day = 86400.0
        with pytest.raises(NotReadyError):
            self.delegated(str(uuid4()), day - 60).outcome()
        with pytest.raises(ResultNotStoredError, match="result_expires"):
            self.delegated(str(uuid4()), day + 60).outcome()

    def test_is_the_value_that_the_task_returned(self) -> None:
        for value in (42, None, ""):
            task_id = str(uuid4())
            app.backend.store_result(task_id, value, "SUCCESS")

            for age in (0, 10 * 86400.0):  # as long as the backend has it
                assert self.delegated(task_id, age).outcome() == value

    @pytest.mark.parametrize("error", [WorkerShutdown(3), Ignore(), WorkerLostError("a")])
    def test_is_not_raised_if_it_would_control_a_worker(self, error: BaseException) -> None:
        task_id = str(uuid4())
        app.backend.store_result(task_id, error, "FAILURE")

        with pytest.raises(ResultNotStoredError, match=type(error).__name__):
            self.delegated(task_id).outcome()

    @pytest.mark.parametrize("body", [bytes(8), b"\xff"])
    def test_is_corrupt_if_its_body_is_truncated(self, body: bytes) -> None:
        record = replace(record_with(Payload(DELEGATED, body)), decode=make_codec().decode)

        with pytest.raises(CorruptRecordError):
            record.outcome()

    def test_is_not_stored_without_a_backend(self) -> None:
        without = Celery("without", backend="disabled://", set_as_current=False)
        codec = PayloadCodec(ResultCodec(without), prepare_accept_content(["json"]))

        with pytest.raises(ResultNotStoredError, match="the result backend cannot return"):
            codec.decode(self.delegated(str(uuid4())))


class WordyError(Exception):
    """Builds its message from its argument."""

    def __init__(self, number: object) -> None:
        super().__init__(f"out of {number}")


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.lock = Lock()


class UnrestorableError(Exception):
    """Cannot be made from its arguments, nor without any."""

    def __new__(cls, number: int, reason: str) -> UnrestorableError:
        return super().__new__(cls, f"{reason} {number}")

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"{reason} {number}")


#: Errors by which code controls Celery, its pool or its process.
CONTROL_FLOW = [
    *(SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException),
    *(Ignore, Reject, Retry, TaskPredicate, WorkerShutdown, WorkerTerminate),
    *(Terminated, MemoryError),
]
PLAIN = PayloadCodec(ResultCodec(), prepare_accept_content(["json"]))
both_codecs = pytest.mark.parametrize("codec", [make_codec(["json"]), PLAIN], ids=["app", "plain"])


class UnprintableError(Exception):
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
            type("MadeHere", (ValueError,), {})("message"),
            ValueError(object),
        ],
        ids=lambda error: type(error).__name__ + str(len(error.args)),
    )
    def test_are_decoded_as_async_result_raises_them(self, error: BaseException) -> None:
        task_id = str(uuid4())
        # As Celery's tracer passes it to the backend.
        app.backend.store_result(task_id, get_pickleable_exception(error), "FAILURE")
        first = app.AsyncResult(task_id).result

        again = decode(encode_error(error), state=State.FAILED)

        assert type(again).__qualname__ == type(first).__qualname__
        assert type(again).__module__ == type(first).__module__
        assert again.args == first.args

    def test_that_cannot_be_pickled_are_decoded_as_celery_reports_them(self) -> None:
        first = get_pickleable_exception(LockedError("sku-7"))

        again = decode(encode_error(LockedError("sku-7")), state=State.FAILED)

        assert type(again) is type(first)
        assert str(again) == str(first) == "LockedError('sku-7')"

    @both_codecs
    def test_keep_their_arguments_however_often_they_are_stored(self, codec: PayloadCodec) -> None:
        # The worker of a duplicate stores the error again, for the duplicate's caller.
        error: BaseException = WordyError(5)
        for _ in range(3):
            error = decode(encode_error(error, codec=codec), codec=codec, state=State.FAILED)

        assert type(error) is WordyError
        assert str(error) == "out of 5"

    def test_are_json_whatever_the_app_writes_and_accepts(self) -> None:
        pickling = Celery("pickling", backend="cache+memory://", set_as_current=False)
        pickling.conf.result_serializer = "pickle"
        codec = PayloadCodec(ResultCodec(pickling), prepare_accept_content(["pickle"]))

        again = decode(encode_error(ValueError(object), codec=codec), codec, State.FAILED)

        assert type(again) is ValueError
        assert again.args == ("<class 'object'>",)

    def test_are_never_unpickled(self) -> None:
        with pytest.raises(CorruptRecordError):
            decode(encode(ValueError("a"), "pickle"), state=State.FAILED)

    @pytest.mark.parametrize(
        "body",
        [
            b"5",
            b"[]",
            b"null",
            b"{}",
            b'"text"',
            b'{"exc_type": "system", "exc_module": "os", "exc_message": ["true"]}',
            b'{"exc_type": "ValueError", "exc_module": "builtins", "exc_message": "text"}',
            b'{"exc_type": 5, "exc_module": [], "exc_message": {}}',
            b'{"exc_module": "os"}',
        ],
    )
    def test_that_were_tampered_with_are_corrupt(self, body: bytes) -> None:
        with pytest.raises(CorruptRecordError, match="shop.charge:digest"):
            decode(Payload("json", body), state=State.FAILED)

    @both_codecs
    @pytest.mark.parametrize("cls", CONTROL_FLOW, ids=lambda cls: cls.__name__)
    def test_that_would_control_a_worker_are_corrupt(
        self, cls: type[BaseException], codec: PayloadCodec
    ) -> None:
        """And they are not stored."""
        error = decode(encode_error(cls.__new__(cls), codec=codec), codec, State.FAILED)
        assert type(error) is ResultNotStoredError
        assert str(error).endswith("was not stored: it ends a worker, or controls Celery")

        forged = {"exc_type": cls.__qualname__, "exc_module": cls.__module__, "exc_message": []}
        with pytest.raises(CorruptRecordError, match="shop.charge:digest"):
            decode(Payload("json", json.dumps(forged).encode()), codec, State.FAILED)

    @both_codecs
    def test_execute_no_code_of_a_module_as_their_class_is_found(
        self, codec: PayloadCodec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def import_lazily(name: str) -> Any:
            raise AssertionError(f"{name} was looked up")

        lazy = ModuleType("lazy")
        lazy.__getattr__ = import_lazily  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "lazy", lazy)
        stored = b'{"exc_type": "GoneError", "exc_module": "lazy", "exc_message": ["sku-7"]}'

        error = decode(Payload("json", stored), codec, State.FAILED)

        assert type(error).__name__ == "GoneError"
        assert error.args == ("sku-7",)

    def test_that_cannot_be_restored_are_not_stored(self) -> None:
        error = decode(encode_error(UnrestorableError("a", 1), codec=PLAIN), PLAIN, State.FAILED)

        assert type(error) is ResultNotStoredError
        assert str(error).endswith("was not stored: it cannot be restored from its arguments")

    @pytest.mark.parametrize(
        "error", [UnprintableError(), ValueError(UnprintableError())], ids=["it", "arg"]
    )
    def test_that_cannot_be_serialized_do_not_fail(self, error: Exception) -> None:
        again = decode(encode_error(error), state=State.FAILED)

        assert isinstance(again, (UnprintableError, ValueError, ResultNotStoredError))

    def test_that_are_too_large_leave_the_reason(self) -> None:
        error = decode(encode_error(ValueError("x" * 1000), max_size=100), state=State.FAILED)

        assert type(error) is ResultNotStoredError
        assert str(error) == (
            "shop.charge:digest has failed, but its error was not stored: "
            "it is larger than idempotency_max_result_size"
        )

    def test_of_a_poisoned_key_name_the_number_of_attempts(self) -> None:
        error = decode(Payload("", b"poisoned"), state=State.FAILED)

        assert type(error) is PoisonedTaskError
        assert "shop.charge:digest has begun 4 times" in str(error)
        assert "rerun the task: celery idempotency rerun" in str(error)

    def test_that_were_not_stored_are_reported(self) -> None:
        error = decode(Payload("", b""), state=State.FAILED)

        assert type(error) is ResultNotStoredError
