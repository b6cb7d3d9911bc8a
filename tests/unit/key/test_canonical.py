"""Canonical bytes of structures that Hypothesis generates."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, localcontext
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.core.key.canonical import (
    MAX_DEPTH,
    NotCanonicalError,
    canonical,
    has_canonical_bytes,
)

pytestmark = pytest.mark.core

# Letters of the format itself, which might be mistaken for delimiters.
texts = st.text("s1:[];", max_size=4) | st.text(max_size=4)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 20)
    | st.integers()
    | st.floats(allow_nan=False)
    | texts
    | texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.datetimes(timezones=st.none() | st.just(timezone.utc))
    | st.dates()
    | st.times()
    | st.timedeltas()
)
hashables = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
    ),
    max_leaves=8,
)


def meaning(value: Any) -> Any:
    """Returns what canonical bytes must distinguish: type and value; a tuple equals a list."""
    if isinstance(value, (list, tuple)):
        return "sequence", tuple(map(meaning, value))
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(meaning, value))
    if isinstance(value, Mapping):
        return "mapping", frozenset((meaning(k), meaning(v)) for k, v in value.items())
    if isinstance(value, (datetime, time)):
        # Messages do not carry it, and Python ignores it when comparing.
        value = value.replace(fold=0)
    # Not the value: 1 == True, 0.0 == -0.0, Decimal("1") == Decimal("1.0").
    return type(value), repr(value)


def read(data: bytes) -> Any:
    """Returns the meaning of the value that `data` encodes."""
    value, rest = _read(data)
    assert rest == b""
    return value


def _read(data: bytes) -> tuple[Any, bytes]:
    tag, data = data[:1], data[1:]
    if tag in _CLOSED_BY:
        members = []
        while not data.startswith(_CLOSED_BY[tag]):
            member, data = _read(data)
            members.append(member)
        return _GATHER[tag](members), data[1:]
    if tag in b"ntu":
        return meaning({b"n": None, b"t": True, b"u": False}[tag]), data
    if tag in b"sb":
        length, _, data = data.partition(b":")
        text, rest = data[: int(length)], data[int(length) :]
        return meaning(text.decode("utf-8", "surrogatepass") if tag == b"s" else text), rest
    if tag == b"U":
        return meaning(UUID(bytes=data[:16])), data[16:]
    text, _, rest = data.partition(b";")
    return meaning(_OF_TEXT[tag](text.decode())), rest


_CLOSED_BY = {b"[": b"]", b"<": b">", b"{": b"}"}
_GATHER: dict[bytes, Callable[[list[Any]], Any]] = {
    b"[": lambda members: ("sequence", tuple(members)),
    b"<": lambda members: ("set", frozenset(members)),
    b"{": lambda members: ("mapping", frozenset(zip(members[::2], members[1::2], strict=True))),
}
_OF_TEXT: dict[bytes, Callable[[str], Any]] = {
    b"i": lambda text: int(text, 16),
    b"f": float,
    b"D": Decimal,
    b"T": datetime.fromisoformat,
    b"A": date.fromisoformat,
    b"M": time.fromisoformat,
    b"P": lambda text: timedelta(*map(int, text.split(","))),
}


@given(values)
def test_bytes_can_be_decoded_so_different_values_have_different_bytes(value: Any) -> None:
    assert read(canonical(value)) == meaning(value)
    assert has_canonical_bytes(type(value))


def disguised(value: Any, chance: random.Random) -> Any:
    """Returns an equal value of other types, in another order."""
    if isinstance(value, (list, tuple)):
        return chance.choice((list, tuple))(disguised(item, chance) for item in value)
    if isinstance(value, dict):
        pairs = [(key, disguised(item, chance)) for key, item in value.items()]
        chance.shuffle(pairs)
        return chance.choice((dict, OrderedDict, lambda p: MappingProxyType(dict(p))))(pairs)
    if isinstance(value, (set, frozenset)):
        members = list(value)
        chance.shuffle(members)
        return chance.choice((set, frozenset))(members)
    if isinstance(value, bytes):
        return chance.choice((bytes, bytearray, memoryview))(value)
    return value


@pytest.mark.exhaustive
@given(values, st.randoms(use_true_random=False))
def test_equal_values_have_equal_bytes(value: Any, chance: random.Random) -> None:
    assert canonical(disguised(value, chance)) == canonical(value)


class Colour(Enum):
    RED = "red"


class Tone(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Text(str):
    def __str__(self) -> str:
        return "something else"


class Number(int):
    def __repr__(self) -> str:
        return "something else"


class Moment(datetime):
    def isoformat(self, *_: Any) -> str:
        return "something else"


class Pair(NamedTuple):
    a: int
    b: int


@dataclass
class Point:
    x: Any


@dataclass
class Place:
    x: Any


def test_a_subclass_is_encoded_by_its_value_not_by_its_text() -> None:
    assert canonical(Text("a")) == canonical("a")
    assert canonical(Number(5)) == canonical(5)
    assert canonical(Moment(2026, 1, 2)) == canonical(datetime(2026, 1, 2))
    assert canonical(Pair(1, 2)) == canonical([1, 2])


def test_enums_and_dataclasses_differ_from_plain_values() -> None:
    alike = ["red", Colour.RED, Tone.RED, Level.LOW, 1, Point(1), Place(1), {"x": 1}, Point]

    assert len({canonical(value) for value in alike[:-1]}) == len(alike) - 1
    assert all(has_canonical_bytes(type(value)) for value in alike[:-1])
    with pytest.raises(NotCanonicalError, match="type type"):
        canonical(Point)


WRAPS = {"list": lambda inner: [inner], "dict": lambda inner: {"a": inner}, "dataclass": Point}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_nesting_is_limited_before_the_stack_overflows(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert canonical(value)

    with pytest.raises(NotCanonicalError, match="deep"):
        canonical(wrap(value))


def test_a_caller_with_a_deep_stack_gets_the_same_error() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = Point(value)

    def call_nested(frames: int) -> bytes:
        return call_nested(frames - 1) if frames else canonical(value)

    with pytest.raises(NotCanonicalError, match="deep"):
        call_nested(sys.getrecursionlimit() - 200)


class Unreadable(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("secret")


def test_a_value_that_cannot_be_read_is_rejected_and_its_error_not_quoted() -> None:
    released = memoryview(b"secret")
    released.release()
    half = Point(1)
    del half.x

    cases = {"RuntimeError": Unreadable(a=1), "ValueError": released, "AttributeError": half}
    for error, value in cases.items():
        with pytest.raises(NotCanonicalError, match=rf"cannot be read \({error}\)") as caught:
            canonical([value])
        assert "secret" not in str(caught.value)


def test_a_decimal_has_the_same_bytes_in_every_context() -> None:
    number = Decimal("1E+30")
    expected = canonical(number)

    with localcontext(Context(prec=2, capitals=0)):
        assert canonical(number) == expected


#: Not the values, which would take memory in every process of the tests.
TOO_LARGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "x" * 70_000_000,
    "bytes": lambda: b"x" * 70_000_000,
    "texts": lambda: ["x" * 10_000_000] * 7,
    "numbers": lambda: [1 << 40_000_000] * 7,
    "list": lambda: [None] * 1_100_000,
    "dict": lambda: dict.fromkeys(range(1_100_000)),
}


@pytest.mark.parametrize("make", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_value_that_is_too_large_is_rejected(make: Callable[[], Any]) -> None:
    with pytest.raises(NotCanonicalError, match="is larger than 64 MiB"):
        canonical(make())


LARGE = {"text": lambda: "x" * 60_000_000, "list": lambda: [None] * 1_000_000}


@pytest.mark.parametrize("make", [*LARGE.values(), lambda: 1 << 8_000_000], ids=[*LARGE, "number"])
def test_a_large_value_is_encoded(make: Callable[[], Any]) -> None:
    assert canonical(make())
