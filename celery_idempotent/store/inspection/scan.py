"""Reads all records without blocking the server.

SCAN returns names in pages, and one round trip reads the heads of a page's records, never a large
result. The primaries of a cluster are scanned one after the other. As SCAN documents, a record that
is written or deleted during the scan may be missed, and a record may be returned twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout

#: Names in one call of SCAN: some tenths of a millisecond of server time.
PAGE = 500
#: Bytes that hold every field before the outcome, unless a task id is unusually long.
HEAD = 640
#: More bytes than Redis can store in a string.
WHOLE = 2**29

_KEY = re.compile(r"[^:]+:~?[A-Za-z0-9_-]{22}")


class ScannedRecord(NamedTuple):
    """One record as a scan reads it."""

    key: Key
    #: The record's bytes, or the first of them.
    raw: bytes
    #: Whether `raw` is the whole record.
    whole: bool
    #: Its expiry; None if it was not read.
    expires_at: datetime | None
    #: The server's time.
    now: datetime


def key_of(text: str, prefix: str) -> Key | None:
    """Returns the key of a record's name, or of a `Record.key`; None if it is neither."""
    # In this order, because a task may have the name of the prefix.
    return key_of_name(text, prefix) or _key(text)


def key_of_name(name: str, prefix: str) -> Key | None:
    """Returns the key of a record's name; None if it is another name."""
    text = name.removeprefix(f"{prefix}:")
    return None if text == name else _key(text)


def _key(text: str) -> Key | None:
    if not _KEY.fullmatch(text):
        return None
    task, _, digest = text.rpartition(":")
    return Key(unquote(task), digest)


def pattern(prefix: str, task: str | None) -> str:
    """Returns the pattern of the names of all records, or of one task's."""
    # A quoted task has none of these special characters.
    return f"{_escaped(prefix)}:{'*' if task is None else quote(task, safe='') + ':*'}"


def message_pattern(prefix: str, task_id: str) -> str:
    """Returns the pattern of the name of a message's record, whatever its key."""
    return f"{_escaped(prefix)}:{{*}}:{Key('', '').of_message(task_id).message}"


def key_of_message(name: str, prefix: str) -> Key | None:
    """Returns the key that the record of a message belongs to; None if it is another name."""
    of_key = name.removeprefix(f"{prefix}:{{").rpartition("}:")[0]
    return key_of_name(of_key, prefix)


def _escaped(text: str) -> str:
    return re.sub(r"([\\*?\[\]^-])", r"\\\1", text)


def names(
    node: Any, match: str, cursor: int = 0, count: int = PAGE
) -> Iterator[tuple[int, list[bytes]]]:
    """Returns the names on one node that match, in pages, which may be empty.

    Each page comes with the cursor of the next one, which is 0 after the last.
    """
    while True:
        cursor, page = node.scan(cursor, match=match, count=count)
        yield cursor, page
        if cursor == 0:
            return


def heads(
    node: Any, keys: Sequence[tuple[Any, Key]], *, expiry: bool = True, size: int = HEAD
) -> list[ScannedRecord]:
    """Returns the records under these names; names without a record are left out.

    Args:
        expiry: read the expiry too, which is half of the work.
        size: bytes of each record that are read.

    Raises:
        RedisError: if the server replies with an error that is not about one record.
    """
    if not keys:
        return []
    pipeline = node.pipeline(transaction=False)
    pipeline.time()
    for name, _ in keys:
        pipeline.getrange(name, 0, size - 1)
        if expiry:
            pipeline.pttl(name)
    replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and "WRONGTYPE" not in str(reply):
            raise reply
    (seconds, microseconds), *replies = replies
    clock = seconds + microseconds / 1e6
    raws, ttls = (replies[::2], replies[1::2]) if expiry else (replies, [-1] * len(keys))
    records = []
    for (_, key), raw, ttl_ms in zip(keys, raws, ttls, strict=True):
        # A value that is not a string cannot be read as a record.
        head = b"?" if isinstance(raw, Exception) else raw
        if head and not layout.is_absent(head):
            expires_at = _utc(clock + ttl_ms / 1e3) if ttl_ms >= 0 else None
            whole = len(head) < size
            records.append(ScannedRecord(key, head, whole, expires_at, _utc(clock)))
    return records


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
