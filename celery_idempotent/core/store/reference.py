"""References: from the task id of a duplicate to the record that it found.

A record names only the task that executed, but monitoring also shows the ids of its duplicates.
Each duplicate therefore writes a key to Redis, named by a digest of its task id. It expires with
the record if both have the same retention.

It also has what became of the duplicate: a letter of `conflict.BECAME`.

References may be missing, since errors of writing them are ignored. They serve searches by task
id; besides, only the check of a revoked or expired message reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_idempotent.core.key import text_digest
from celery_idempotent.core.record import Record, layout

#: Precedes the digest in the name of a reference; the name of a record has its task's name there.
MARK = "@"

#: The letter of a duplicate that got the record's outcome.
REPLAYED = "r"
#: Bytes before the task id.
_FIXED = 11


class Reference(NamedTuple):
    """The record that a duplicate found."""

    #: The `Record.key` of that record.
    key: str
    #: What became of the duplicate: a letter of `conflict.BECAME`.
    end: str
    #: The task id, token and attempt of the execution in the record.
    task_id: str
    token: int
    attempt: int

    @property
    def replayed(self) -> bool:
        """Whether it got the record's outcome; if not, the record only kept it from running."""
        return self.end == REPLAYED


def name(prefix: str, task_id: str) -> str:
    """Returns the name of the reference of `task_id` in Redis."""
    digest = text_digest(b"reference" + task_id.encode(errors="surrogatepass"))
    return f"{prefix}:{MARK}{digest}"


def command(
    prefix: str, task_id: str, record: Record, end: str, retention_ms: int
) -> tuple[Any, ...]:
    """Returns the command that writes a reference from `task_id` to `record`.

    Args:
        end: what became of the duplicate: a letter.
        retention_ms: milliseconds to keep it, counted from the outcome if there is one.
    """
    expiry = (
        ("PXAT", record.at_ms + retention_ms) if record.state.finished else ("PX", retention_ms)
    )
    return "SET", name(prefix, task_id), write(record, end), *expiry


def write(record: Record, end: str) -> bytes:
    """Returns the bytes of a reference to `record`."""
    task_id = layout.write_task_id(record.task_id)
    return b"".join(
        (
            end.encode(),
            record.attempt.to_bytes(1, "big"),
            record.token.to_bytes(7, "big"),
            len(task_id).to_bytes(2, "big"),
            task_id,
            record.key.encode(),
        )
    )


def read(raw: bytes) -> Reference | None:
    """Returns the reference that `raw` holds; None if it is damaged or from a newer version."""
    end = _FIXED + int.from_bytes(raw[9:_FIXED], "big")
    if not raw[:1].islower() or not _FIXED < end < len(raw):
        return None
    try:
        return Reference(
            key=raw[end:].decode(),
            end=chr(raw[0]),
            task_id=layout.read_task_id(raw[_FIXED:end]),
            token=int.from_bytes(raw[2:9], "big"),
            attempt=raw[1],
        )
    except ValueError:
        return None
