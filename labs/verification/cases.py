"""Draws random sequences of calls of the scripts, with the model's replies and keys."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from labs.verification import model
from labs.verification.model import Keys, Names, Record, Turn

#: The server's time in microseconds; one that shows how it is rounded.
NOW_US = 1_795_000_000_999_501
NOW_MS = NOW_US // 1000
#: Calls after which a sequence begins with other keys.
_SEQUENCE = 40
_KEY = "idem:{task:digest}"
RESULT = "celery-task-meta-{task:digest}"
_DAMAGED = (b"", b"garbage" * 9, b"Z" + bytes(40))
#: Of tokens: that a clock has fallen back.
_LEAPS_US = (-5_000_000, 1_000_000, 9_000_000)


class OtherType:
    """The value of a key that is not a string."""


Value = bytes | OtherType
#: By name: the value, and the expiry in milliseconds or None.
Stored = dict[str, tuple[Value, int | None]]


_RESULTS: tuple[Value, ...] = (
    b"", b"another result", b'{"status": "RETRY"}', b'{"status": "SUCCESS"}', OtherType(),
)  # fmt: skip


class Call(NamedTuple):
    """A call that is to be made."""

    script: str
    keys: list[str]
    argv: list[Any]
    #: Makes it in the model, at a time of the server in microseconds.
    model: Callable[[int], model.Reply]


class Case(NamedTuple):
    """A call at `NOW_US`, and its effects according to the model."""

    script: str
    keys: list[str]
    argv: list[Any]
    before: Stored
    reply: bytes
    after: Stored
    published: bytes = b""
    #: The server refuses to publish.
    is_mute: bool = False


def encode(value: Record | Turn | bytes) -> bytes:
    """Returns the bytes of a key."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Turn):
        return value.token.to_bytes(7, "big") + value.record.encode()
    fields = (
        (1, value.fingerprint), (2, value.task_id), (1, value.worker), (1, value.owner),
        (1, value.tail),
    )  # fmt: skip
    return b"".join((
        value.letter.encode(), value.attempt.to_bytes(1, "big"), value.token.to_bytes(7, "big"),
        value.at.to_bytes(6, "big"),
        *(len(field).to_bytes(size, "big") + field for size, field in fields), value.body,
    ))  # fmt: skip


def cases(script: str, number: int, seed: int = 1) -> list[Case]:
    """Returns calls of a script, as they occur in sequences of calls of all scripts."""
    drawn = (case for case in _sequences(random.Random(seed)) if case.script == script)
    return list(islice(drawn, number))


def _sequences(rnd: random.Random) -> Iterator[Case]:
    while True:
        walk = Walk(rnd, NOW_US)
        for _ in range(_SEQUENCE):
            yield walk.case()


class Walk:
    """A sequence of calls on the keys of one slot.

    Args:
        now_us: the server's time; may be changed between two calls.
    """

    def __init__(self, rnd: random.Random, now_us: int) -> None:
        self.rnd = rnd
        self.now_us = now_us
        self.keys = Keys()
        modes = ("task", "expired", "reserved", "finished", "started")
        self.mode = rnd.choice(modes)
        self.lease = rnd.choice([20_000, 60_000])
        self.found: Value | None = None
        self.is_mute = False
        #: The shortest retention.
        self.shortest_ms = 1

    def change(self) -> None:
        """Changes a key now and then, as time does, a clock that falls back, or another program."""
        rnd = self.rnd
        if rnd.random() < 0.4 and self.keys:
            self._leap()
        if rnd.random() < 0.02:  # idempotency_until has changed
            self.mode = rnd.choice(["expired", "finished"])
            for name in [name for name, value in self.keys.items() if isinstance(value, bytes)]:
                del self.keys[name]

    def call(self) -> Call:
        """Draws a call."""
        name = self.rnd.choices(
            ["begin", "extend", "settle", "abandon", "queue", "forget"], [5, 2, 3, 1, 2, 1]
        )[0]
        task = self.rnd.choice([b"a", b"a", b"b", b"c"])
        keys, argv, apply = getattr(self, f"_{name}")(task, self._names(task))
        return Call(name, [key for key in keys if key], argv, apply)

    def case(self) -> Case:
        """Draws a call, and makes it in the model."""
        self.change()
        before = self.stored()
        call = self.call()
        case, record = call.model(self.now_us)
        after = self.stored()
        seconds, microseconds = divmod(self.now_us, 1_000_000)
        if call.script == "begin" and case in ("finished", "reused", "corrupt"):
            seconds, microseconds = 0, 0  # begin replies before it reads the clock
        reply = f"{case} {seconds} {microseconds} ".encode()
        reply += b"" if record is None else encode(record)
        if RESULT not in call.keys:
            return Case(*call[:3], before, reply, after)
        if self.found is not None:
            before[RESULT] = self.found, self._expires
            if case != "written":
                after[RESULT] = before[RESULT]
        self.keys.pop(RESULT, None)
        published = f"{RESULT}the result ".encode() if case == "written" else b""
        return Case(*call[:3], before, reply, after, published, self.is_mute)

    def stored(self) -> Stored:
        """Returns the keys as a server has them."""
        return {key: (encode(value), self._expiry(key)) for key, value in self.keys.items()}

    @property
    def _now_ms(self) -> int:
        return self.now_us // 1000

    @property
    def _expires(self) -> int:
        return self._now_ms + 100_000

    def _names(self, task: bytes) -> Names:
        message = f"{_KEY}:{task.decode()}"
        slot = f"{_KEY}:"
        return {
            "task": Names(message),
            "expired": Names(_KEY),
            "reserved": Names(_KEY, slot),
        }.get(self.mode) or Names(message, slot, _KEY)

    def _expiry(self, name: str) -> int | None:
        return self.keys.expires.get(name, self._expires)

    def _leap(self) -> None:
        """Moves a time or a token, or damages a record."""
        rnd, name = self.rnd, self.rnd.choice(sorted(self.keys))
        value, token = self.keys[name], self.now_us + self.rnd.choice(_LEAPS_US)
        if isinstance(value, Turn):
            self.keys[name] = value._replace(token=token)
        elif isinstance(value, Record):
            at = self._now_ms + rnd.choice([-50_000, -1, 0, 1, 50_000])
            self.keys[name] = value._replace(at=at)
            if name.endswith(":"):  # until when a quiet time can postpone the begin
                until = self._now_ms + rnd.choice([-1_000, 2_000, 9_000])
                self.keys[name] = value._replace(at=at, token=until)
            if rnd.random() < 0.3 and not name.endswith(":"):
                self.keys[name] = value._replace(at=at, token=token)
            elif rnd.random() < 0.1 and not name.endswith(":"):
                self.keys[name] = value._replace(attempt=rnd.choice([0, 254, 255]))
        self.keys.expires[name] = self._expires + rnd.choice([0, 10**6])
        if rnd.random() < 0.03 and name == self._names(b"a").record:
            self.keys[name] = rnd.choice(_DAMAGED)

    def _token(self, names: Names | None = None) -> int:
        record = self.keys.record(names.record) if names else None
        if record and record.token and self.rnd.random() < 0.6:
            return record.token
        tokens = [
            each.token for each in self.keys.values() if not isinstance(each, bytes) and each.token
        ]
        return self.rnd.choice([*tokens, 5])

    def _worker(self) -> bytes:
        return self.rnd.choice([b"host/1", b"host/2"])

    def _deadline(self) -> int:
        return self._now_ms + self.rnd.choice([-9_000, -1, 0, *[9_000] * 9])

    def _fingerprint(self) -> bytes:
        if self.rnd.random() < 0.7:
            return b"A" * 8
        return self.rnd.choice([b"", b"A" * 8, b"B" * 8])

    def _tail(self) -> bytes:
        return self.rnd.choice([b"", b"json", b"\x05label"])

    def _begin(self, task: bytes, names: Names) -> Any:
        rnd = self.rnd
        execution = rnd.choice([b"E" * 8, b"F" * 8, rnd.randbytes(8)])
        ttl = self.lease + rnd.choice([1_000, 600_000])
        arguments = (
            execution, task, rnd.choice([0, 0, 1, 2]), self._fingerprint(), self._worker(),
            self._tail(), self.lease, ttl, rnd.choice([1_000, 600_000]), self._deadline(),
            rnd.choice([0, 0, 0, 1, 2]),
        )  # fmt: skip
        return names, [*arguments], lambda us: model.begin(self.keys, us, names, *arguments)

    def _extend(self, task: bytes, names: Names) -> Any:
        step = self.rnd.choice([b"", b"step 1", b"step 2"])
        arguments = self._token(names), self.lease, self.lease + 600_000, step
        keys = (names.record, names.turn)
        return keys, [*arguments], lambda us: model.extend(self.keys, us, names, *arguments)

    def _settle(self, task: bytes, names: Names) -> Any:
        rnd = self.rnd
        letter = rnd.choice(["V", "T", "T", "E", "D", "W", ""])
        at = {"T": self.lease, "W": 30_000}.get(letter, 0)
        owner = rnd.choice([b"0", b"1", b"2"]) if letter in ("W", "D") else b""
        arguments = (
            self._token(names),
            letter,
            at,
            owner,
            self._tail(),
            b"42",
            rnd.choice([self.shortest_ms, 60_000]),
        )
        if letter == "V" and rnd.random() < 0.1:
            arguments = (0, *arguments[1:])  # a replay
        if letter != "V" or (rnd.random() < 0.5 and arguments[0]):
            keys = (names.record, names.turn) if letter == "W" else (names.record,)
            return (
                keys,
                [*arguments, b"", 0],
                lambda us: model.settle(self.keys, us, names, *arguments),
            )
        self.found = rnd.choice([None, *_RESULTS])
        self.is_mute = rnd.random() < 0.2
        if self.found is not None:
            self.keys[RESULT] = b"" if isinstance(self.found, OtherType) else self.found
        arguments = (*arguments, RESULT, b"the result", rnd.choice([0, 60]))
        may_publish = not self.is_mute
        return (
            (names.record, RESULT),
            [*arguments[:7], *arguments[8:]],
            lambda us: model.settle(self.keys, us, names, *arguments, may_publish=may_publish),
        )

    def _abandon(self, task: bytes, names: Names) -> Any:
        arguments = task, self._worker(), self.rnd.choice([0, 1_000, 10**6]), b"process_lost"
        return (
            (names.record,),
            [*arguments],
            lambda us: model.abandon(self.keys, us, names, *arguments),
        )

    def _queue(self, task: bytes, names: Names) -> Any:
        rnd = self.rnd
        names = names._replace(slot=f"{_KEY}:")
        if self.mode != "finished":
            names = names._replace(turn=None)
        newest = [b"", b"newest 1", b"newest 2", b"="] if self.mode == "started" else [b""]
        arguments = (
            task, self._deadline(), rnd.choice([0, 50_000, 50_000]), self._fingerprint(),
            self._tail(), rnd.choice(newest), 90_000, rnd.choice([0, 5_000]), 9_000,
        )  # fmt: skip
        return (
            (names.slot, names.record, names.turn),
            [*arguments],
            lambda us: model.queue(self.keys, us, names, *arguments),
        )

    def _forget(self, task: bytes, names: Names) -> Any:
        token = self.rnd.choice([None, None, 0, self._token()])
        force, deadline = self.rnd.random() < 0.5, self._deadline()
        if names.turn:
            is_key = self.rnd.random() < 0.8
            names = Names(names.turn, names.slot) if is_key else Names(names.record)
        letters = self.rnd.choice(["", "W", "BAba", "DTtV", "EX", "WBAbaDTtVEX"])
        argv = [deadline, b"" if token is None else token, letters, b"1" if force else b""]
        return (
            names,
            argv,
            lambda us: model.forget(self.keys, us, names, deadline, token, letters, force),
        )
