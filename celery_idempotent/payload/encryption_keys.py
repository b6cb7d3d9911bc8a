"""The keys of ``idempotency_encryption_keys``, from wherever they are kept, and their cipher."""

from __future__ import annotations

from typing import Any

from kombu.utils.imports import symbol_by_name

from celery_idempotent.errors import SettingsError
from celery_idempotent.payload.cipher import Cipher
from celery_idempotent.settings import Settings


def check(options: Settings) -> None:
    """Refuses keys that stand in the settings and are none.

    Where a function gives them it is not called yet: a process that only publishes needs no keys,
    and a path may lead into a module that is still being imported.

    Raises:
        SettingsError: never quoting a key.
    """
    if isinstance(options.encryption_keys, tuple):
        Cipher(options.encryption_keys)


def cipher(options: Settings) -> Cipher | None:
    """The cipher of the keys as they are now; None if nothing is to be encrypted.

    Raises:
        SettingsError: if the keys cannot be had, or are none; never quoting one.
    """
    keys = options.encryption_keys
    return None if keys is None else Cipher(_given_by(keys))


def _given_by(source: Any) -> tuple[str | bytes, ...]:
    try:
        found = symbol_by_name(source) if isinstance(source, str) else source
        keys = found() if callable(found) else found
    except Exception as error:
        # Not its message: that may quote a key.
        where = f"{source!r}" if isinstance(source, str) else "its function"
        raise SettingsError(
            f"idempotency_encryption_keys: {where} gave no keys, but {type(error).__name__}"
        ) from None
    if not isinstance(keys, (tuple, list)):
        raise SettingsError(
            "idempotency_encryption_keys: expected a tuple of Fernet keys from its function, "
            f"got {type(keys).__name__}"
        )
    return tuple(keys)
