"""Makes calls of a script whose keys are written before, and reads the keys afterwards.

The tables draw the calls, and compare their effects with the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, islice
from typing import Any, NamedTuple

import redis

from celery_idempotent.store import scripts
from labs.verification.model import Record
from labs.verification.wire import MOMENT, TOLERANCE_MS, encode, timeless, times_of

#: Calls in one pipeline.
_PIPELINED = 60

#: Precedes a script: sets times to the server's time plus some milliseconds, as the last argument
#: lists them: number of the key, position, milliseconds, and `t` for a decimal number. Older
#: servers let time pass during a script, so the time that was used is stored.
_TIMES_FROM_NOW = """
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


def mismatches(table: Any, client: redis.Redis, name: str, cases: int) -> Iterator[str]:
    """Yields a description of each call of a table whose effect differs from the model's."""
    script = scripts.load(name)
    sha = client.script_load(_TIMES_FROM_NOW + script.source)
    seconds, _ = client.time()
    now_ms = seconds * 1000
    drawn = table.all_cases(name, cases, now_ms)
    while batch := list(islice(drawn, _PIPELINED)):
        pipeline = client.pipeline(transaction=False)
        calls = [
            table.call(script, case, f"idem:{number}", now_ms) for number, case in enumerate(batch)
        ]
        lasting = [call.is_lasting(now_ms) for call in calls]
        for call in compress(calls, lasting):
            call.queue(pipeline, sha)
        replies = iter(pipeline.execute(raise_on_error=False))
        for case, call in compress(zip(batch, calls, strict=True), lasting):
            if mismatch := table.compare(script, case, call.effect(replies)):
                yield f"{name}: {mismatch}: {case}"
