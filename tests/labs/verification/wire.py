"""The model's records as the server has them, and the server's moments as the model has them."""

from __future__ import annotations

from tests.labs.verification.model import Error, Record

#: Milliseconds between an answer and a look at how long the record has left, on a busy machine. No
#: two durations in use are that close to each other.
TOLERANCE_MS = 10_000

#: Where the moment is noted that `AT_THE_MOMENT` has chosen.
MOMENT = ":moment"

#: Before a script: the record's time becomes the server's now, less so many milliseconds. Older
#: servers let time pass within a script, so the moment is noted.
AT_THE_MOMENT = """
do
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  redis.call('SETRANGE', KEYS[1], 9, struct.pack('>I6', now - (%d)))
  redis.call('SET', KEYS[1] .. ':moment', now, 'PX', 60000)
end
"""


def written(record: Record | None) -> bytes | None:
    """The record's bytes, as record/layout.py lists them."""
    if record is None:
        return None
    fields = (
        (1, record.fingerprint), (2, record.task_id), (1, record.worker), (1, record.execution_id),
        (1, record.format),
    )  # fmt: skip
    return b"".join((
        record.state.encode(), record.attempt.to_bytes(1, "big"), record.token.to_bytes(7, "big"),
        record.at.to_bytes(6, "big"),
        *(len(field).to_bytes(size, "big") + field for size, field in fields),
        *map(entry, record.errors), record.body,
    ))  # fmt: skip


def entry(error: Error) -> bytes:
    """The error's bytes, as record/steps.py lists them."""
    rest = b"".join((
        b"\0\0", error.state.encode(), error.generation.to_bytes(7, "big"),
        error.at.to_bytes(6, "big"), len(error.task_id).to_bytes(2, "big"), error.task_id,
        len(error.format).to_bytes(1, "big"), error.format, error.body,
    ))  # fmt: skip
    return len(rest).to_bytes(4, "big") + rest


def microsecond(now_ms: int, raw: bytes | None) -> int:
    """The server's clock: a token that it gave tells it to the microsecond."""
    token = int.from_bytes(raw[2:9], "big") if raw else 0
    return token if token // 1000 == now_ms else now_ms * 1000
