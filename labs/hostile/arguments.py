"""Random arguments that are easily confused, and an independent notion of which ones are equal."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

from kombu import serialization


class Colour(Enum):
    RED = "red"
    ONE = 1


class Size(str, Enum):
    RED = "red"
    SMALL = "1"


@dataclass
class Point:
    x: Any
    y: Any = 0


_NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)

#: Scalars that one serializer or another takes for one another.
_CONFUSABLE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64 - 1, 10**40),
    *(0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, float("inf"), float("-inf"), float("nan")),
    *("", "0", "1", "1.0", "True", "None", "null", "nan", "a", "A", " a", "a ", "a\n", "a\0"),
    *("é", "e\u0301", "ß", "ss", "\u212b", "\u00e5", "\ud800", "\U0001f600", "\ud83d\ude00"),
    *("{", "}", "{0}", "%s", "$1", "..", "__type__", "__value__", "s1:a", "i1;", "[n]", "x" * 300),
)
#: Those that JSON or msgpack change, or refuse.
_RICH: tuple[Any, ...] = (
    *(b"", b"a", b"\xff", bytearray(b"a"), UUID(int=1), UUID(int=2)),
    *map(Decimal, ("1", "1.0", "1.00", "-0", "NaN", "1E+30")),
    *(_NOON, _NOON.replace(tzinfo=None), _NOON.astimezone(timezone(timedelta(hours=1)))),
    *(date(2026, 1, 2), time(12), time(12, tzinfo=timezone.utc)),
    *(timedelta(1), timedelta(seconds=86400), timedelta(microseconds=1)),
    *(Colour.RED, Colour.ONE, Size.RED, Size.SMALL, object(), len, int),
)
_SCALARS = _CONFUSABLE + _RICH


class Arguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Generator:
    """Draws arguments for a task with the parameters ``a, b=0, *rest, c=None, **more``."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> Arguments:
        args = tuple(self._value(3) for _ in range(self._random.choice((1, 1, 1, 2, 2, 3))))
        names = self._random.sample(
            ("c", "d", "e", "1", "é", "x y"), self._random.choice((0, 0, 1, 2))
        )
        return Arguments(args, {name: self._value(3) for name in names})

    def _value(self, depth: int) -> Any:
        kind = self._random.random()
        if depth == 0 or kind < 0.55:
            return self._random.choice(_SCALARS)
        if kind < 0.65:
            return self._random.randrange(-(10**6), 10**6)
        if kind < 0.7:
            return "".join(self._random.choices("aé1.:;[]{}", k=self._random.randrange(12)))
        members = [self._value(depth - 1) for _ in range(self._random.randrange(4))]
        if kind < 0.8:
            return members
        if kind < 0.85:
            return tuple(members)
        if kind < 0.9:
            return {value for value in members if _is_hashable(value)}
        if kind < 0.93:
            return Point(members[0] if members else None, depth)
        names = [self._random.choice(_SCALARS) for _ in members]
        hashable = [name if _is_hashable(name) else "name" for name in names]
        return dict(zip(hashable, members, strict=True))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def received(call: Arguments, serializer: str) -> Arguments | None:
    """Returns the arguments as a worker receives them; None if no publisher can send them."""
    try:
        content_type, encoding, data = serialization.dumps(
            [list(call.args), call.kwargs], serializer
        )
        args, kwargs = serialization.loads(data, content_type, encoding, accept=[content_type])
    except Exception:
        return None
    return Arguments(tuple(args), kwargs)


class NotComparableError(Exception):
    """The value equals nothing, or has no value at all."""


def identity_of(call: Arguments) -> Any:
    """Returns a value that two calls share exactly if a worker cannot distinguish them.

    Raises:
        NotComparableError: if an argument has no identity.
    """
    a, *others = call.args
    b, rest = (others[0] if others else 0), tuple(others[1:])
    named = {"a": a, "b": b, "*": rest, "c": None, **call.kwargs}
    defaults = {"b": 0, "*": (), "c": None}
    return frozenset(
        (name, identity)
        for name, value in named.items()
        if (identity := _identity(value)) != _identity(defaults.get(name, _identity))
    )


def _identity(value: Any) -> Any:
    if value is _identity:
        return "no default"
    kind = type(value)
    if value is None or kind in (bool, str, bytes, int, UUID):
        return kind.__name__, value
    if kind in (float, Decimal) and value != value:
        raise NotComparableError
    if kind is float:
        return "float", struct.pack(">d", value)
    if isinstance(value, Enum):
        return "enum", kind.__qualname__, _identity(value.value)
    if is_dataclass(value) and not isinstance(value, type):
        members = ((field.name, _identity(getattr(value, field.name))) for field in fields(value))
        return "dataclass", kind.__qualname__, frozenset(members)
    if kind is bytearray:
        return "bytes", bytes(value)
    if kind in (list, tuple):
        return "list", tuple(map(_identity, value))
    if kind in (set, frozenset):
        return "set", frozenset(map(_identity, value))
    if isinstance(value, Mapping):
        return "dict", frozenset(
            (_identity(name), _identity(member)) for name, member in value.items()
        )
    if kind in (Decimal, datetime, date, time, timedelta):
        return kind.__name__, str(value)
    raise NotComparableError


def stable_repr(value: Any) -> str:
    """Returns the same text for equal values, whatever the order of a set."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(stable_repr, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(stable_repr, value))})"
    if isinstance(value, dict):
        return stable_repr({(name, stable_repr(member)) for name, member in value.items()})
    if isinstance(value, Point):
        return f"Point({stable_repr(vars(value))})"
    return repr(value)
