"""Encryption at rest: Fernet (AES-128-CBC with HMAC-SHA256), with rotatable keys.

The setting ``idempotency_encryption_keys`` holds the keys, or a function that returns them. None
among them stands for plain text, so that encryption is rolled out like a key.
"""

from __future__ import annotations

import contextlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.core.flow.extension import Option
from celery_idempotent.core.key.canonical import canonical, digest
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.record import Payload
from celery_idempotent.errors import CorruptRecordError, SettingsError
from celery_idempotent.settings import MARKS, Settings

_MARK = MARKS["encryption_keys"]
_CONTEXT_BYTES = 16


class Cipher:
    """Encrypts with the first key and decrypts with any; the key None leaves a body plain.

    Each body is encrypted together with a digest of its context (prefix, record, field and format),
    so that a payload copied to another deployment, record or step cannot be decrypted there.

    Args:
        keys: Fernet keys, newest first, with at most one None.
        prefix: of the names in Redis.

    Raises:
        SettingsError: if one is not a Fernet key, or `cryptography` is not installed.
    """

    def __init__(self, keys: Sequence[str | bytes | None], prefix: str) -> None:
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError:
            raise SettingsError(
                "idempotency_encryption_keys needs the library cryptography: "
                "pip install celery-idempotent[encryption]"
            ) from None
        ciphers = []
        for number, key in enumerate(keys, 1):
            if key is None:
                continue
            try:
                ciphers.append(Fernet(key))
            except (TypeError, ValueError):
                raise SettingsError(
                    f"idempotency_encryption_keys: key {number} of {len(keys)} is not a Fernet "
                    "key; create one with cryptography.fernet.Fernet.generate_key()"
                ) from None
        if not ciphers:
            raise SettingsError("idempotency_encryption_keys is empty; set at least one key")
        self._writes_plain, self._reads_plain = keys[0] is None, None in keys
        self._fernet = MultiFernet(ciphers)
        self._invalid_token = InvalidToken
        self._prefix = prefix

    def encrypt(self, payload: Payload, key: str, field: str) -> Payload:
        """Returns `payload` encrypted for this field of this record; 74 to 89 bytes longer.

        It returns `payload` itself if the first key is None.
        """
        if self._writes_plain:
            return payload
        context = self._digest(key, field, payload.format)
        # Fernet returns base64; records hold bytes.
        body = urlsafe_b64decode(self._fernet.encrypt(context + payload.body))
        return Payload(_MARK + payload.format, body)

    def decrypt(self, payload: Payload, key: str, field: str) -> Payload:
        """Returns the payload that :meth:`encrypt` encrypted.

        Raises:
            CorruptRecordError: if no key fits, the context differs or it was altered; or if it is
                plain, and None is not a key.
        """
        if not payload.format.startswith(_MARK):
            if self._reads_plain:
                return payload
            raise CorruptRecordError(
                f"the {field} of {key} is not encrypted: it is forged, or older than the keys; "
                "until older values have expired, end idempotency_encryption_keys with None"
            )
        plain_format = payload.format.removeprefix(_MARK)
        with contextlib.suppress(self._invalid_token):
            decrypted = self._fernet.decrypt(urlsafe_b64encode(payload.body))
            if decrypted[:_CONTEXT_BYTES] == self._digest(key, field, plain_format):
                return Payload(plain_format, decrypted[_CONTEXT_BYTES:])
        raise CorruptRecordError(
            f"the {field} of {key} cannot be decrypted: its key is not in "
            "idempotency_encryption_keys, or it was tampered with; add the key, or forget the "
            "record to start afresh"
        )

    def _digest(self, *context: str) -> bytes:
        return digest(b"place" + canonical((self._prefix, *context)), _CONTEXT_BYTES)


class Encryption(Option):
    """The option ``idempotency_encryption_keys``."""

    @classmethod
    def resolve(cls, settings: Settings, where: str, app: Any) -> Settings:
        """Rejects invalid keys that are part of the settings.

        A function that returns keys is not called yet: a process that only publishes needs no keys,
        and the function's module may not be fully imported.
        """
        if isinstance(settings.encryption_keys, tuple):
            Cipher(settings.encryption_keys, settings.key_prefix)
        return settings

    @classmethod
    def extend_codec(cls, codec: PayloadCodec, settings: Settings, app: Any) -> None:
        """Adds a cipher with the current keys; error messages never quote a key."""
        codec.cipher = Cipher(_read(settings.encryption_keys), settings.key_prefix)

    @classmethod
    def summary(cls, settings: Settings) -> str:
        """Returns that values are encrypted."""
        return "encrypted"

    @classmethod
    def findings(cls, task: Any) -> Iterator[Sequence[str]]:
        """Yields that labels are not encrypted."""
        if task.idempotency_configuration.label:
            yield (
                *("label-in-clear", "note"),
                "its label is stored in plain text, although results are encrypted",
                "a label with only fields that are not secret, or none",
                "anyone who can read Redis, the logs or the events can read labels",
            )


def _read(source: Any) -> tuple[str | bytes | None, ...]:
    try:
        named = symbol_by_name(source) if isinstance(source, str) else source
        keys = named() if callable(named) else named
    except Exception as error:
        # Only the type of the error is shown, because its message may quote a key.
        where = f"{source!r}" if isinstance(source, str) else "its function"
        raise SettingsError(
            f"idempotency_encryption_keys: {where} raised {type(error).__name__} instead of "
            "returning keys"
        ) from None
    if not isinstance(keys, (tuple, list)):
        raise SettingsError(
            "idempotency_encryption_keys: its function must return a tuple of Fernet keys, "
            f"not {type(keys).__name__}"
        )
    return tuple(keys)
