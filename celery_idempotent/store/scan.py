"""Going over all records without standing in anybody's way.

SCAN, a page at a time, never KEYS; of each record its head, never a large result; every page one
round trip, which the server answers between other clients' commands. Of a Cluster each primary is
asked in turn. A record that is written or dropped meanwhile may or may not be seen, and one may be
seen twice while Redis makes its table larger: that is what SCAN promises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout

#: Names that SCAN looks at in one call: some tenths of a millisecond of the server's time.
PAGE = 500
#: Bytes that hold every field before the outcome, but for task ids of unusual length.
HEAD = 640

_KEY = re.compile(r"[^:]+:[A-Za-z0-9_-]{22}")


class ScannedRecord(NamedTuple):
    """One record as a scan comes by it."""

    key: Key
    #: The record's bytes, or the first of them.
    raw: bytes
    #: Whether `raw` is all of it.
    whole: bool
    #: When Redis forgets it; None where that was not asked.
    expires_at: datetime | None
    #: The server's time.
    now: datetime


def key_of(text: str, prefix: str) -> Key | None:
    """The key that a record's name, or `Record.key`, stands for; None if it is neither."""
    # In this order: a task may be named like the prefix.
    return key_of_name(text, prefix) or _key(text)


def key_of_name(name: str, prefix: str) -> Key | None:
    """The key that a record's name stands for; None if it is none."""
    text = name.removeprefix(f"{prefix}:")
    return None if text == name else _key(text)


def _key(text: str) -> Key | None:
    if not _KEY.fullmatch(text):
        return None
    task, _, digest = text.rpartition(":")
    return Key(unquote(task), digest)


def pattern(prefix: str, task: str | None) -> str:
    """What the names of all records match, or of one task's."""
    # Letters that a pattern of Redis would read otherwise; in a quoted task there are none.
    escaped = re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix)
    return f"{escaped}:{'*' if task is None else quote(task, safe='') + ':*'}"


def names(node: Any, match: str) -> Iterator[list[bytes]]:
    """The names on one node that match, a page at a time; a page may be empty."""
    cursor = 0
    while True:
        cursor, page = node.scan(cursor, match=match, count=PAGE)
        yield page
        if cursor == 0:
            return


def heads(
    node: Any, keys: Sequence[tuple[Any, Key]], *, expiry: bool = True
) -> list[ScannedRecord]:
    """What stands under each of these names; those with nothing are left out.

    Args:
        expiry: ask for the expiry too, which is half of the work.

    Raises:
        RedisError: if the server refuses, or is busy: that tells nothing of a record.
    """
    if not keys:
        return []
    pipeline = node.pipeline(transaction=False)
    pipeline.time()
    for name, _ in keys:
        pipeline.getrange(name, 0, HEAD - 1)
        if expiry:
            pipeline.pttl(name)
    answers = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
            raise answer
    (seconds, microseconds), *answers = answers
    clock = seconds + microseconds / 1e6
    raws, lefts = (answers[::2], answers[1::2]) if expiry else (answers, [-1] * len(keys))
    found = []
    for (_, key), raw, left_ms in zip(keys, raws, lefts, strict=True):
        # Another kind of value, which nobody can read as a record.
        head = b"?" if isinstance(raw, Exception) else raw
        if head and not layout.is_absent(head):
            end = _moment(clock + left_ms / 1e3) if left_ms >= 0 else None
            found.append(ScannedRecord(key, head, len(head) < HEAD, end, _moment(clock)))
    return found


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
