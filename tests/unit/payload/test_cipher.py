"""Encryption at rest: what a look into Redis shows, and what tampering with it brings."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cryptography.fernet import Fernet
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.errors import CorruptRecordError, DecryptionError, SettingsError
from celery_idempotent.payload.cipher import Cipher
from celery_idempotent.payload.codec import ERROR, RESULT, step_field
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import State
from tests.unit.payload.test_codec import (
    KEY,
    PLAIN,
    BaseRecordStore,
    OutOfStockError,
    codec,
    error_written,
    read,
    written,
)
from tests.unit.serializers import SERIALIZERS

OLD, NEW, LOST = (Fernet.generate_key() for _ in range(3))
SECRET = "4111-1111-1111-1111"

desk = codec(cipher=Cipher([NEW]))


@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_a_result_comes_back_as_it_was(serializer: str) -> None:
    for value in PLAIN:
        back = read(written(value, serializer, by=desk), by=desk)

        assert back == value
        assert type(back) is type(value)


def test_nothing_of_it_can_be_read_in_redis() -> None:
    payload = written({"card": SECRET}, by=desk)

    assert payload.format == "!json"
    assert SECRET.encode() not in payload.body
    assert b"card" not in payload.body


def test_neither_can_anything_of_an_error() -> None:
    payload = error_written(OutOfStockError(SECRET, 5), by=desk)

    assert payload.format == "!json"
    assert b"4111" not in payload.body
    assert b"OutOfStock" not in payload.body
    assert read(payload, by=desk, state=State.FAILED).args == (SECRET, 5)


def test_the_same_value_looks_different_each_time() -> None:
    assert written(SECRET, by=desk).body != written(SECRET, by=desk).body


def test_compression_comes_first() -> None:
    payload = written("text " * 1000, compression="gzip", by=desk)

    assert payload.format == "!json+gzip"
    assert len(payload.body) < 300
    assert read(payload, by=desk) == "text " * 1000


def test_what_is_in_the_depot_is_encrypted_there() -> None:
    shelf = BaseRecordStore()
    keeper = codec(offload_storage=shelf, cipher=Cipher([NEW]))

    payload = written(SECRET, max_size=10, by=keeper)

    assert payload == Payload("@!json", b"shop.charge:digest:17")
    assert SECRET.encode() not in shelf.kept["shop.charge:digest:17"]
    assert read(payload, by=keeper) == SECRET


def test_the_size_that_counts_is_that_of_the_encrypted_bytes() -> None:
    assert written("x" * 50, max_size=60).has_value
    assert not written("x" * 50, max_size=60, by=desk).has_value


class TestRotation:
    def test_the_first_key_encrypts_and_all_decrypt(self) -> None:
        before = written(SECRET, by=codec(cipher=Cipher([OLD])))
        both = codec(cipher=Cipher([NEW, OLD]))
        after = written(SECRET, by=both)

        assert read(before, by=both) == read(after, by=both) == SECRET
        assert read(after, by=desk) == SECRET

    def test_a_key_that_is_taken_away_takes_its_results_along(self) -> None:
        before = written(SECRET, by=codec(cipher=Cipher([OLD])))

        with pytest.raises(DecryptionError) as caught:
            read(before, by=desk)
        assert str(caught.value) == (
            "the result of shop.charge:digest cannot be decrypted: its key is not in "
            "idempotency_encryption_keys, or it was tampered with; add the key, or forget the "
            "record to start afresh"
        )

    def test_without_any_key_it_is_said_which_setting_is_missing(self) -> None:
        for payload, state in [
            (written(SECRET, by=desk), State.COMPLETED),
            (error_written(ValueError(SECRET), by=desk), State.FAILED),
        ]:
            with pytest.raises(DecryptionError, match="has no idempotency_encryption_keys"):
                read(payload, state=state)

    def test_what_was_written_before_encryption_is_still_read(self) -> None:
        assert read(written(SECRET), by=desk) == SECRET
        assert read(error_written(ValueError("a")), by=desk, state=State.FAILED).args == ("a",)


class TestTampering:
    def test_with_any_byte_is_found_out(self) -> None:
        payload = written("x", by=desk)

        for context in range(len(payload.body)):
            body = bytearray(payload.body)
            body[context] ^= 1
            with pytest.raises(DecryptionError):
                read(Payload(payload.format, bytes(body)), by=desk)

    def test_cutting_it_short_is_found_out(self) -> None:
        payload = written("x", by=desk)

        for length in range(len(payload.body)):
            with pytest.raises(DecryptionError):
                read(Payload(payload.format, payload.body[:length]), by=desk)

    @given(st.binary(max_size=200))
    def test_any_bytes_are_found_out(self, body: bytes) -> None:
        with pytest.raises(DecryptionError):
            read(Payload("!json", body), by=desk)

    def test_a_body_from_another_record_is_refused(self) -> None:
        with pytest.raises(DecryptionError):
            read(written("theirs", key="shop.charge:other", by=desk), by=desk)

    def test_a_body_of_another_part_is_refused(self) -> None:
        parts = [RESULT, ERROR, step_field("a"), step_field("b")]
        payload = {field: written("x", field=field, by=desk) for field in parts}

        for field in parts:
            for other in parts:
                if other == field:
                    assert desk.load(payload[field], KEY, other) == "x"
                    continue
                with pytest.raises(DecryptionError):
                    desk.load(payload[field], KEY, other)

    def test_a_result_does_not_pass_for_an_error(self) -> None:
        forged = {"exc_type": "ValueError", "exc_module": "builtins", "exc_message": []}

        with pytest.raises(DecryptionError):
            read(written(forged, by=desk), by=desk, state=State.FAILED)

    @pytest.mark.parametrize("form", ["!pickle", "!json+gzip", "!", "!!json", "@!json"])
    def test_another_format_is_refused(self, form: str) -> None:
        payload = written("x", by=desk)

        with pytest.raises(CorruptRecordError):
            read(Payload(form, payload.body), by=desk)

    def test_a_body_that_is_said_to_be_plain_is_corrupt(self) -> None:
        with pytest.raises(CorruptRecordError, match="cannot be decoded as json"):
            read(Payload("json", written("x", by=desk).body), by=desk)


class TestKeys:
    @pytest.mark.parametrize("key", [b"short", "x" * 44, b"", "ü" * 44, 5, None], ids=repr)
    def test_that_are_none_are_refused_and_not_shown(self, key: Any) -> None:
        with pytest.raises(SettingsError) as caught:
            Cipher([NEW, key])

        assert str(caught.value) == (
            "idempotency_encryption_keys: key 2 of 2 is not a Fernet key; "
            "create one with cryptography.fernet.Fernet.generate_key()"
        )
        assert caught.value.__suppress_context__

    def test_may_be_text(self) -> None:
        cipher = Cipher([NEW.decode()])

        assert Cipher([NEW]).decrypt(cipher.encrypt(b"x", "k"), "k") == b"x"

    def test_there_must_be_one(self) -> None:
        with pytest.raises(SettingsError, match="idempotency_encryption_keys is empty"):
            Cipher([])

    def test_need_a_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cryptography.fernet", None)

        with pytest.raises(SettingsError) as caught:
            Cipher([NEW])
        assert str(caught.value) == (
            "idempotency_encryption_keys needs the library cryptography: "
            "pip install celery-idempotent[encryption]"
        )


def test_places_do_not_run_into_each_other() -> None:
    cipher = Cipher([LOST])

    assert cipher.decrypt(cipher.encrypt(b"x", "a", "bc"), "ab", "c") is None
    assert cipher.decrypt(cipher.encrypt(b"x", "a", ""), "a") is None
