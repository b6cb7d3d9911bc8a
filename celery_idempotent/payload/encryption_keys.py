"""Reads ``idempotency_encryption_keys``, which may name a function, and creates their cipher."""

from __future__ import annotations

from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.errors import SettingsError
from celery_idempotent.payload.cipher import Cipher
from celery_idempotent.settings import Settings


def check(options: Settings) -> None:
    """Rejects invalid keys that are part of the settings.

    A function that returns keys is not called yet: a process that only publishes needs no keys, and
    the module of the function may not be imported completely.

    Raises:
        SettingsError: if a key is invalid. The message never quotes a key.
    """
    if isinstance(options.encryption_keys, tuple):
        Cipher(options.encryption_keys, options.key_prefix)


def cipher(options: Settings) -> Cipher | None:
    """Returns a cipher with the current keys; None if encryption is off.

    Raises:
        SettingsError: if the keys cannot be read, or are invalid. The message never quotes a key.
    """
    keys = options.encryption_keys
    return None if keys is None else Cipher(_read(keys), options.key_prefix)


def _read(source: Any) -> tuple[str | bytes, ...]:
    try:
        named = symbol_by_name(source) if isinstance(source, str) else source
        keys = named() if callable(named) else named
    except Exception as error:
        # Without its message, which may quote a key.
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
