"""Payloads that are too large for Redis: stored in an offload storage, and deleted there."""

from __future__ import annotations

import asyncio
import re
from threading import get_ident

import pytest

from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.payload.value_codec import MAX_DECODED
from celery_idempotent.core.record import RESULT, Payload, State, step_field, steps
from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import CorruptRecordError, ResultNotStoredError
from celery_idempotent.settings import Settings
from tests.unit.payload.encoding import (
    KEY,
    MemoryStorage,
    decode,
    decode_field,
    encode,
    encode_error,
    make_codec,
    record_with,
)


class TestOffloadStorage:
    def test_that_is_not_configured_is_an_error(self) -> None:
        payload = encode("x" * 99, max_size=9, codec=make_codec(offload_storage=MemoryStorage()))

        with pytest.raises(ResultNotStoredError, match="has no idempotency_offload_backend"):
            decode(payload)

    def test_gets_the_retention(self) -> None:
        storage = MemoryStorage()
        settings = Settings(serializer="json", max_result_size=0, result_ttl=60, error_ttl=90)

        codec = make_codec(offload_storage=storage)
        run_sync(codec.encode_result(1, settings, key=KEY, token=17))
        assert storage.seconds == 60
        run_sync(codec.encode_error(ValueError(), settings, key=KEY, token=17))
        assert storage.seconds == 90

    def test_has_one_object_for_each_field(self) -> None:
        storage = MemoryStorage()
        codec = make_codec(offload_storage=storage)
        fields = [RESULT, step_field("a"), step_field("a/../../b"), step_field("x" * 1000)]
        for field in fields:
            payload = encode(field, max_size=0, field=field, codec=codec)
            assert decode_field(payload, field, codec) == field
        error = encode_error(ValueError("a"), max_size=0, codec=codec)
        assert decode(error, codec=codec, state=State.FAILED).args == ("a",)

        assert len(storage.objects) == len(fields) + 1
        own = re.compile(r"shop\.charge:digest:17(:[\w-]{12})?")
        assert all(map(own.fullmatch, storage.objects))

    def test_shows_no_value_that_is_too_large(self) -> None:
        """The object counts, and not its name."""
        codec = make_codec(offload_storage=MemoryStorage())
        for size in (MAX_DECODED - 2, MAX_DECODED - 1):
            value = "x" * size  # and two quotes
            record = record_with(encode(value, max_size=0, codec=codec))
            if size == MAX_DECODED - 2:
                assert codec.view(record) == value
            else:
                with pytest.raises(ResultNotStoredError, match="not shown: it has 8,388,609 bytes"):
                    codec.view(record)

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
    def test_is_never_used_with_a_name_that_the_record_cannot_have_written(self, name: str) -> None:
        storage = MemoryStorage()
        storage.objects[name] = b"1"
        codec = make_codec(offload_storage=storage)
        forged = Payload("@json", name.encode())

        with pytest.raises(CorruptRecordError, match="names an object that is not its own"):
            decode(forged, codec=codec)
        run_sync(codec.delete_record_objects(record_with(forged)))
        assert storage.objects == {name: b"1"}

    def test_that_fails_to_delete_is_only_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        storage = MemoryStorage()
        codec = make_codec(offload_storage=storage)
        payload = encode(1, max_size=0, codec=codec)
        storage.unavailable = True

        run_sync(codec.delete_record_objects(record_with(payload)))
        damaged = record_with(Payload("", b"\0\0\0\x09cut"), State.STARTED)
        run_sync(codec.delete_record_objects(damaged))
        run_sync(make_codec().delete_record_objects(record_with(payload)))

        (message,) = caplog.messages
        assert message == (
            "shop.charge:digest: its result could not be deleted from "
            "idempotency_offload_backend: OSError"
        )


def test_on_an_event_loop_only_the_offload_storage_is_used_in_a_thread() -> None:
    storage = MemoryStorage()
    threads = storage.threads
    settings = Settings(serializer="json", max_result_size=10)

    async def use(codec: PayloadCodec) -> None:
        small = await codec.encode_result("x", settings, key=KEY, token=17)
        assert await codec.decode_outcome(record_with(small)) == ("x", False)
        await codec.delete_record_objects(record_with(small))
        assert threads == []

        large = await codec.encode_result("x" * 10, settings, key=KEY, token=17)
        assert await codec.decode_outcome(record_with(large)) == ("x" * 10, False)
        field = step_field("a")
        step = await codec.encode_result("y" * 10, settings, key=KEY, token=17, field=field)
        assert await codec.decode_field(step, KEY, field) == "y" * 10
        await codec.delete_record_objects(record_with(large))
        await codec.delete_step_objects(steps.write("a", *step), KEY)
        assert storage.objects == {}
        assert len(threads) == 6

    asyncio.run(use(make_codec(offload_storage=storage)))
    assert set(threads) == {get_ident()}

    threads.clear()
    asyncio.run(use(make_codec(offload_storage=storage).for_asyncio()))
    assert get_ident() not in threads
