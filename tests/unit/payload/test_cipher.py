"""Encryption at rest: payloads in Redis reveal nothing, and tampering is detected."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cryptography.fernet import Fernet
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.core.record import ERROR, RESULT, Payload, State, step_field
from celery_idempotent.errors import CorruptRecordError, SettingsError
from celery_idempotent.extensions.encryption import Cipher
from tests.unit.payload.encoding import (
    MemoryStorage,
    OutOfStockError,
    decode,
    decode_field,
    encode,
    encode_error,
    make_codec,
)

OLD, NEW, LOST = (Fernet.generate_key() for _ in range(3))
PREFIX = "idem"
SECRET = "4111-1111-1111-1111"
PAYLOAD = Payload("json", b"x")

ENCRYPTING = make_codec(cipher=Cipher([NEW], PREFIX))


def test_a_payload_reveals_nothing_and_differs_each_time() -> None:
    for encoded in (
        lambda: encode({"card": SECRET}, codec=ENCRYPTING),
        lambda: encode_error(OutOfStockError(SECRET, 5), codec=ENCRYPTING),
    ):
        payload = encoded()
        assert payload.format == "!json"
        assert not [part for part in (b"4111", b"card", b"OutOfStock") if part in payload.body]
        assert payload.body != encoded().body
    assert decode(payload, codec=ENCRYPTING, state=State.FAILED).args == (SECRET, 5)


def test_compression_precedes_encryption() -> None:
    payload = encode("text " * 1000, compression="gzip", codec=ENCRYPTING)

    assert payload.format == "!json+gzip"
    assert len(payload.body) < 300
    assert decode(payload, codec=ENCRYPTING) == "text " * 1000


def test_offloaded_objects_are_encrypted() -> None:
    storage = MemoryStorage()
    codec = make_codec(offload_storage=storage, cipher=Cipher([NEW], PREFIX))

    payload = encode(SECRET, max_size=10, codec=codec)

    assert payload == Payload("@!json", b"shop.charge:digest:17")
    assert SECRET.encode() not in storage.objects["shop.charge:digest:17"]
    assert decode(payload, codec=codec) == SECRET


def test_the_maximum_size_applies_to_encrypted_bytes() -> None:
    assert encode("x" * 50, max_size=60).format
    assert not encode("x" * 50, max_size=60, codec=ENCRYPTING).format


class TestRotation:
    def test_without_keys_the_error_names_the_setting(self) -> None:
        for payload, state in [
            (encode(SECRET, codec=ENCRYPTING), State.COMPLETED),
            (encode_error(ValueError(SECRET), codec=ENCRYPTING), State.FAILED),
        ]:
            with pytest.raises(CorruptRecordError, match="has no idempotency_encryption_keys"):
                decode(payload, state=state)

    def test_plain_text_is_a_key_that_is_rotated_out(self) -> None:
        plain, encrypted = encode(SECRET), encode(SECRET, codec=ENCRYPTING)
        first, second = (make_codec(cipher=Cipher(k, PREFIX)) for k in ([None, NEW], [NEW, None]))

        assert encode(SECRET, codec=first) == plain
        assert encode(SECRET, codec=second).format == "!json"
        for codec in (first, second):
            assert decode(plain, codec=codec) == decode(encrypted, codec=codec) == SECRET

    def test_without_that_key_plain_payloads_are_rejected(self) -> None:
        error = encode_error(ValueError("a"))
        for payload, state in ((encode(SECRET), State.COMPLETED), (error, State.FAILED)):
            with pytest.raises(CorruptRecordError, match="encryption_keys with None"):
                decode(payload, codec=ENCRYPTING, state=state)


class TestTampering:
    def test_with_any_byte_is_detected(self) -> None:
        payload = encode("x", codec=ENCRYPTING)

        for position in range(len(payload.body)):
            body = bytearray(payload.body)
            body[position] ^= 1
            with pytest.raises(CorruptRecordError, match="decrypted"):
                decode(Payload(payload.format, bytes(body)), codec=ENCRYPTING)

    @given(st.binary(max_size=200))
    def test_arbitrary_bytes_are_rejected(self, body: bytes) -> None:
        with pytest.raises(CorruptRecordError, match="decrypted"):
            decode(Payload("!json", body), codec=ENCRYPTING)

    def test_the_body_of_another_record_deployment_or_state_is_rejected(self) -> None:
        staging = make_codec(cipher=Cipher([NEW], "staging"))
        error = {"exc_type": "ValueError", "exc_module": "builtins", "exc_message": []}

        for forged, state in [
            (encode("theirs", key="shop.charge:other", codec=ENCRYPTING), State.COMPLETED),
            (encode("theirs", codec=staging), State.COMPLETED),
            (encode_error(ValueError("theirs"), codec=staging), State.FAILED),
            (encode(error, codec=ENCRYPTING), State.FAILED),
        ]:
            with pytest.raises(CorruptRecordError, match="decrypted"):
                decode(forged, codec=ENCRYPTING, state=state)

    def test_the_body_of_another_field_is_rejected(self) -> None:
        fields = [RESULT, ERROR, step_field("a"), step_field("b")]
        payloads = {field: encode("x", field=field, codec=ENCRYPTING) for field in fields}

        for field in fields:
            for other in fields:
                if other == field:
                    assert decode_field(payloads[field], other, ENCRYPTING) == "x"
                    continue
                with pytest.raises(CorruptRecordError, match="decrypted"):
                    decode_field(payloads[field], other, ENCRYPTING)

    @pytest.mark.parametrize("form", ["!pickle", "!json+gzip", "!", "!!json", "@!json"])
    def test_another_format_is_rejected(self, form: str) -> None:
        payload = encode("x", codec=ENCRYPTING)

        with pytest.raises(CorruptRecordError):
            decode(Payload(form, payload.body), codec=ENCRYPTING)

    def test_an_encrypted_body_with_a_plain_format_is_rejected(self) -> None:
        with pytest.raises(CorruptRecordError, match="is not encrypted"):
            decode(Payload("json", encode("x", codec=ENCRYPTING).body), codec=ENCRYPTING)


class TestKeys:
    @pytest.mark.parametrize("key", [b"short", "x" * 44, b"", "ü" * 44, 5], ids=repr)
    def test_that_are_invalid_are_rejected_without_being_quoted(self, key: Any) -> None:
        with pytest.raises(SettingsError) as caught:
            Cipher([NEW, key], PREFIX)

        assert str(caught.value) == (
            "idempotency_encryption_keys: key 2 of 2 is not a Fernet key; "
            "create one with cryptography.fernet.Fernet.generate_key()"
        )
        assert caught.value.__suppress_context__

    @pytest.mark.parametrize("keys", [[], [None]])
    def test_must_not_be_empty(self, keys: list[None]) -> None:
        with pytest.raises(SettingsError, match="idempotency_encryption_keys is empty"):
            Cipher(keys, PREFIX)

    def test_need_the_library_cryptography(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cryptography.fernet", None)

        with pytest.raises(SettingsError) as caught:
            Cipher([NEW], PREFIX)
        assert str(caught.value) == (
            "idempotency_encryption_keys needs the library cryptography: "
            "pip install celery-idempotent[encryption]"
        )


def test_contexts_are_unambiguous() -> None:
    cipher = Cipher([LOST], PREFIX)

    for written, read in ((("a", "bc"), ("ab", "c")), (("a", ""), ("", "a"))):
        with pytest.raises(CorruptRecordError, match="decrypted"):
            cipher.decrypt(cipher.encrypt(PAYLOAD, *written), *read)
