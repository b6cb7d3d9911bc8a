"""Encryption at rest: Fernet (AES-128-CBC with HMAC-SHA256), with keys that can be rotated."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

from celery_idempotent.errors import SettingsError
from celery_idempotent.key.canonical import canonical, digest

_CONTEXT_BYTES = 16


class Cipher:
    """Encrypts with the first key, decrypts with any.

    Each body is encrypted together with a digest of its context (prefix, record, field and format),
    so that a payload copied to another deployment, record or step cannot be decrypted there.

    Args:
        keys: Fernet keys, the newest first.
        prefix: ``idempotency_key_prefix``.

    Raises:
        SettingsError: if one is not a Fernet key, or `cryptography` is not installed.
    """

    def __init__(self, keys: Sequence[str | bytes], prefix: str) -> None:
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError:
            raise SettingsError(
                "idempotency_encryption_keys needs the library cryptography: "
                "pip install celery-idempotent[encryption]"
            ) from None
        ciphers = []
        for number, key in enumerate(keys, 1):
            try:
                ciphers.append(Fernet(key))
            except (TypeError, ValueError):
                raise SettingsError(
                    f"idempotency_encryption_keys: key {number} of {len(keys)} is not a Fernet "
                    "key; create one with cryptography.fernet.Fernet.generate_key()"
                ) from None
        if not ciphers:
            raise SettingsError("idempotency_encryption_keys is empty; set at least one key")
        self._fernet = MultiFernet(ciphers)
        self._invalid_token = InvalidToken
        self._prefix = prefix

    def encrypt(self, body: bytes, *context: str) -> bytes:
        """Returns `body` encrypted for this context only; 74 to 89 bytes longer."""
        # Fernet returns base64; records hold bytes.
        return urlsafe_b64decode(self._fernet.encrypt(self._digest(context) + body))

    def decrypt(self, data: bytes, *context: str) -> bytes | None:
        """Returns the body; None if no key fits, the context differs, or it was tampered with."""
        try:
            decrypted = self._fernet.decrypt(urlsafe_b64encode(data))
        except self._invalid_token:
            return None
        if decrypted[:_CONTEXT_BYTES] != self._digest(context):
            return None
        return decrypted[_CONTEXT_BYTES:]

    def _digest(self, context: tuple[str, ...]) -> bytes:
        return digest(b"place" + canonical((self._prefix, *context)), _CONTEXT_BYTES)
