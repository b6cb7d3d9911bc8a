"""Converts the model's records to bytes, and the server's times to the model's."""

from __future__ import annotations

from tests.labs.verification.model import Error, Record

#: Milliseconds that may pass between a reply and reading the time to live, on a busy machine. All
#: durations in use differ by more than this.
TOLERANCE_MS = 10_000

#: Suffix of the key in which `AT_THE_MOMENT` stores the time that it used.
MOMENT = ":moment"

#: Precedes a script: sets the record's time to the server's time minus some milliseconds. Older
#: servers let time pass during a script, so the time that was used is stored.
AT_THE_MOMENT = """
do
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  redis.call('SETRANGE', KEYS[1], 9, struct.pack('>I6', now - (%d)))
  redis.call('SET', KEYS[1] .. ':moment', now, 'PX', 60000)
end
"""


def encode(record: Record | None) -> bytes | None:
    """Returns the record's bytes, as record/layout.py documents them."""
    if record is None:
        return None
    fields = (
        (1, record.fingerprint), (2, record.task_id), (1, record.worker), (1, record.owner),
        (1, record.format),
    )  # fmt: skip
    return b"".join((
        record.state.encode(), record.attempt.to_bytes(1, "big"), record.token.to_bytes(7, "big"),
        record.at.to_bytes(6, "big"),
        *(len(field).to_bytes(size, "big") + field for size, field in fields),
        *map(entry, record.errors), record.body,
    ))  # fmt: skip


def entry(error: Error) -> bytes:
    """Returns the error's bytes, as record/steps.py documents them."""
    rest = b"".join((
        b"\0\0", error.state.encode(), error.generation.to_bytes(7, "big"),
        error.at.to_bytes(6, "big"), len(error.task_id).to_bytes(2, "big"), error.task_id,
        len(error.format).to_bytes(1, "big"), error.format, error.body,
    ))  # fmt: skip
    return len(rest).to_bytes(4, "big") + rest


def microsecond(now_ms: int, raw: bytes | None) -> int:
    """Returns the server's time in microseconds, taken from a token if the script drew one."""
    token = int.from_bytes(raw[2:9], "big") if raw else 0
    return token if token // 1000 == now_ms else now_ms * 1000
