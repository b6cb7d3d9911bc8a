"""Names of records in Redis, and what is read under them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record
from celery_idempotent.store.place import Place


class Shelf:
    """All records of one place.

    Args:
        place: which Redis, and how it is spoken to.
        decode: turns a finished record's body into its result.
    """

    def __init__(self, place: Place, decode: Callable[[Record], Any]) -> None:
        self.place = place
        self._decode = decode

    def name(self, key: Key) -> str:
        """The name of the record in Redis."""
        return f"{self.place.prefix}:{key}"

    def record(self, key: Key, raw: bytes, expires_at: datetime | None = None) -> Record:
        """The record that `raw` holds.

        Raises:
            CorruptRecordError: if it cannot be read.
        """
        return layout.read(raw, str(key), key.task, self._decode, expires_at)
