"""Encryption at rest: Fernet (AES-128-CBC with HMAC-SHA256), under keys that can be rotated."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

from celery_idempotent.errors import SettingsError
from celery_idempotent.key.canonical import canonical, digest

_PLACE_BYTES = 16


class Cipher:
    """Encrypts under the first key, decrypts under any.

    Each body is encrypted behind a digest of the place it belongs to, so that nobody can pass the
    result of one record, or of a step, for another's.

    Args:
        keys: Fernet keys, the newest first.

    Raises:
        SettingsError: if one of them is no Fernet key, or the library that knows is missing.
    """

    def __init__(self, keys: Sequence[str | bytes]) -> None:
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError:
            raise SettingsError(
                "idempotency_encryption_keys needs a library that is not installed: "
                "pip install celery-idempotent[encryption]"
            ) from None
        ciphers = []
        for number, key in enumerate(keys, 1):
            try:
                ciphers.append(Fernet(key))
            except (TypeError, ValueError):
                raise SettingsError(
                    f"idempotency_encryption_keys: number {number} of {len(keys)} is no Fernet "
                    "key; cryptography.fernet.Fernet.generate_key() makes one"
                ) from None
        if not ciphers:
            raise SettingsError("idempotency_encryption_keys has no key in it")
        self._fernet = MultiFernet(ciphers)
        self._refusal = InvalidToken

    def encrypt(self, body: bytes, *context: str) -> bytes:
        """`body`, 74 to 89 bytes longer, to be decrypted for the same place only."""
        # Fernet's letters are base64; a record has room for bytes.
        return urlsafe_b64decode(self._fernet.encrypt(_mark(context) + body))

    def decrypt(self, data: bytes, *context: str) -> bytes | None:
        """The body; None if no key fits, or if it was tampered with or belongs somewhere else."""
        try:
            marked = self._fernet.decrypt(urlsafe_b64encode(data))
        except self._refusal:
            return None
        return marked[_PLACE_BYTES:] if marked[:_PLACE_BYTES] == _mark(context) else None


def _mark(context: tuple[str, ...]) -> bytes:
    return digest(b"place" + canonical(context), _PLACE_BYTES)
