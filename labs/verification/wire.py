"""Converts the model's records to bytes, and the server's times to the model's."""

from __future__ import annotations

from labs.verification.model import Record, Waiting

#: Milliseconds that may pass between a reply and reading the time to live, on a busy machine. All
#: durations in use differ by more than this.
TOLERANCE_MS = 10_000

#: Suffix of the key in which the scripts below store the time that they used.
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
    owner = record.root + record.owner
    if record.sending:
        owner += record.until.to_bytes(6, "big")
    form = record.format if record.met is None else record.format + b",%d" % record.met
    fields = (
        (1, record.fingerprint), (2, record.task_id), (1, record.worker), (1, owner),
        (1, form),
    )  # fmt: skip
    return b"".join((
        record.state.encode(), record.attempt.to_bytes(1, "big"), record.token.to_bytes(7, "big"),
        record.at.to_bytes(6, "big"),
        *(len(field).to_bytes(size, "big") + field for size, field in fields),
        *map(entry, record.waiting), record.body,
    ))  # fmt: skip


def entry(waiting: Waiting) -> bytes:
    """Returns the bytes of the message that waits, as record/steps.py documents them."""
    rest = b"".join((
        b"\0\0W", bytes(7), waiting.at.to_bytes(6, "big"), len(waiting.task_id).to_bytes(2, "big"),
        waiting.task_id, len(waiting.fingerprint).to_bytes(1, "big"), waiting.fingerprint,
    ))  # fmt: skip
    return len(rest).to_bytes(4, "big") + rest


def timeless(record: Record) -> bytes:
    """Returns the bytes of a record whose times are from now, without these."""
    waiting = tuple(each._replace(at=0) for each in record.waiting)
    met = None if record.met is None else 10**12  # as many digits as a time has
    return encode(record._replace(at=0, until=0, waiting=waiting, met=met)) or b""


def times_of(number: int, record: Record) -> list[str]:
    """Returns the times of the record under the key with that number, for `TIMES_FROM_NOW`."""
    times = [f"{number} 9 {record.at}"]
    fields = record.fingerprint, record.task_id, record.worker, record.root, record.owner
    until = 15 + 5 + sum(map(len, fields))
    if record.sending:
        times.append(f"{number} {until} {record.until}")
    if record.met is not None:
        times.append(f"{number} {until + 2 + len(record.format)} {record.met}t")
    if record.waiting:
        head = timeless(record._replace(waiting=(), body=b""))
        times.append(f"{number} {len(head) + 14} {record.waiting[0].at}")
    return times


def at(record: Record | None, moment: int) -> Record | None:
    """Returns a record whose times are from now with the times that the script has met."""
    if record is None:
        return None
    waiting = tuple(each._replace(at=each.at + moment) for each in record.waiting)
    until = record.until + moment if record.sending else 0
    met = None if record.met is None else record.met + moment
    return record._replace(at=record.at + moment, until=until, waiting=waiting, met=met)


def microsecond(now_ms: int, raw: bytes | None) -> int:
    """Returns the server's time in microseconds, taken from a token if the script drew one."""
    token = int.from_bytes(raw[2:9], "big") if raw else 0
    return token if token // 1000 == now_ms else now_ms * 1000
