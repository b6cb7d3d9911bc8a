"""Converts the model's records to bytes, and the server's times to the model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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

#: The same for any times, as the last argument lists them: number of the key, position,
#: milliseconds from now, and `t` for a decimal number.
TIMES_FROM_NOW = """
do
  local clock = redis.call('TIME')
  local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  for key, position, ms, text in string.gmatch(table.remove(ARGV), '(%d+) (%d+) (-?%d+)(t?)') do
    local time = text == 't' and string.format('%.0f', now + ms) or struct.pack('>I6', now + ms)
    redis.call('SETRANGE', KEYS[tonumber(key)], position, time)
  end
  redis.call('SET', KEYS[1] .. ':moment', now, 'PX', 60000)
end
"""


class OtherType:
    """A value that is not a string."""

    def __repr__(self) -> str:
        return "OTHER_TYPE"


OTHER_TYPE = OtherType()
#: The error of a command that meets one.
WRONG_TYPE = b"WRONGTYPE"
#: What a key may hold.
Value = Record | bytes | OtherType | None


class Effect(NamedTuple):
    """What a call replies and stores."""

    reply: Any
    #: The server's time in milliseconds: of the call, and when the keys were read.
    moment: int
    read_at: int
    #: The value and the time to live of each key.
    keys: list[tuple[Any, int]]
    #: How much the times to live may differ from the model's.
    tolerance_ms: int = TOLERANCE_MS

    def difference(self, what: str, number: int, expected: Record | None) -> str:
        """Returns how a key differs from the model's record, or ""."""
        raw, _ = self.keys[number]
        if expected is not None and expected.expires <= self.moment + 1 and self.tolerance_ms:
            return ""  # the server may have forgotten it already
        if raw != encode(expected):
            return f"stores the {what} {raw!r}, not {encode(expected)!r}"
        return "" if expected is None else self.expiry_difference(what, number, expected.expires)

    def expiry_difference(self, what: str, number: int, expires: int) -> str:
        _, ttl_ms = self.keys[number]
        if ttl_ms < 0 or abs(self.read_at + ttl_ms - expires) > self.tolerance_ms:
            return f"stores the {what} for {ttl_ms} ms"
        return ""


class Call(NamedTuple):
    """One call of a script."""

    keys: list[str]
    argv: list[Any]
    #: By key: the value before the call, whose times are from now, and when it expires. Also of
    #: keys that the script is not given.
    before: dict[str, tuple[Value, int]]
    #: Whether the server refuses to publish.
    is_mute: bool = False

    def is_lasting(self, now_ms: int) -> bool:
        """Whether the call can be made on a server, where time passes."""
        expiries = [expires for value, expires in self.before.values() if value is not None]
        return not self.is_mute and min(expiries, default=now_ms + 10**6) > now_ms + TOLERANCE_MS

    def queue(self, pipeline: Any, sha: str) -> None:
        """Adds the call to a pipeline; `effect` takes what the server replies."""
        times = []
        for name, (value, expires) in self.before.items():
            if value is None:
                pipeline.delete(name)
            elif isinstance(value, bytes):
                pipeline.set(name, value, pxat=expires)
            elif isinstance(value, OtherType):
                pipeline.delete(name).rpush(name, "item").pexpireat(name, expires)
            else:
                pipeline.set(name, timeless(value), pxat=expires)
                times += times_of(self.keys.index(name) + 1, value)
        pipeline.evalsha(sha, len(self.keys), *self.keys, *self.argv, ";".join(times))
        pipeline.get(self.keys[0] + MOMENT)
        for name in self.before:
            pipeline.get(name).pttl(name)
        pipeline.time().delete(*self.before)

    def effect(self, replies: Iterator[Any]) -> Effect:
        """Returns the effect from the replies to the commands of `queue`."""
        for value, _ in self.before.values():
            for _ in range(3 if isinstance(value, OtherType) else 1):
                next(replies)
        reply, moment = _readable(next(replies)), int(next(replies))
        keys = [(_readable(next(replies)), next(replies)) for _ in self.before]
        seconds, microseconds = next(replies)
        next(replies)
        return Effect(reply, moment, seconds * 1000 + microseconds // 1000, keys)


def _readable(reply: Any) -> Any:
    """Returns `WRONG_TYPE` for that error; else the reply."""
    return WRONG_TYPE if isinstance(reply, Exception) and "WRONGTYPE" in str(reply) else reply


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
