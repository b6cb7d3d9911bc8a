"""Canonical bytes: equal arguments give equal bytes, different ones never do.

Every value is written with a tag for its type, so ``1``, ``1.0``, ``True`` and ``"1"`` differ, and
text and bytes with their length, so no value can imitate another one's end. Mappings and sets are
sorted by the bytes of their members. Lists and tuples are one kind, because a message turns the
one into the other. The same bytes come out of every process, platform and Python version; golden
keys in the tests hold them still, and `VERSION` goes into every digest in case they must move.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from typing import Any
from uuid import UUID

VERSION = b"idempotent1"

#: Nesting that is taken for a structure that contains itself.
MAX_DEPTH = 100
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"
#: What one value may cost: text its bytes, each member of a structure this many. Sixty lists, each
#: with the one before in it twice, are soon pickled and would be written out for ever.
MAX_COST = 64 * 1024 * 1024
MEMBER_COST = 64
#: An integer of fewer bits costs no more than any member, its sign included.
_LONG_BITS = 4 * (MEMBER_COST - 1)
_TOO_LARGE = f"is larger than {MAX_COST >> 20} MiB, or has more than a million members"


class NotCanonicalError(TypeError):
    """The value has no canonical form; says which type, never what it holds."""


def digest(data: bytes, size: int) -> bytes:
    """`size` bytes of BLAKE2b over `data`, kept apart from every other use of that hash."""
    return blake2b(data, digest_size=size, person=VERSION).digest()


def canonical(value: Any) -> bytes:
    """The canonical bytes of `value`.

    Raises:
        NotCanonicalError: for a type that has none, for NaN, for nesting beyond `MAX_DEPTH` and for
            what costs more than `MAX_COST`.
    """
    try:
        return (_ENCODERS.get(type(value)) or _encoder_of(value))(value, _Budget())
    except NotCanonicalError:
        raise
    except RecursionError:
        # The caller stood deep in its own stack already.
        raise NotCanonicalError(_TOO_DEEP) from None
    except Exception as error:
        # A type of the application's own that cannot be read. What it says may quote a value.
        raise NotCanonicalError(f"cannot be read ({type(error).__name__})") from None


def has_form(kind: type) -> bool:
    """Whether values of this type have canonical bytes, as far as the type alone tells."""
    known = kind in _ENCODERS or issubclass(kind, Enum) or dataclasses.is_dataclass(kind)
    return known or any(issubclass(kind, one) for one, _ in _KINDS)


class _Budget:
    """The way through one value: how deep it is, and what it has cost."""

    # Of the class, so that a plain value, whose walk is over at once, does not pay for them.
    depth = 0
    cost = 0

    def spend(self, cost: int) -> None:
        self.cost += cost
        if self.cost > MAX_COST:
            raise NotCanonicalError(_TOO_LARGE)

    def down(self, members: int) -> None:
        """Go to the members of a structure."""
        self.spend(members * MEMBER_COST)
        self.depth += 1
        if self.depth > MAX_DEPTH and members:
            raise NotCanonicalError(_TOO_DEEP)

    def up(self) -> None:
        self.depth -= 1


def _encode(value: Any, budget: _Budget) -> bytes:
    encode = _ENCODERS.get(type(value)) or _encoder_of(value)
    return encode(value, budget)


def _encoder_of(value: Any) -> Callable[[Any, _Budget], bytes]:
    """The encoder for an instance of a subclass, or of a kind rather than a type."""
    if isinstance(value, Enum):
        return _enum
    for kind, encode in _KINDS:
        if isinstance(value, kind):
            return encode
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass
    raise NotCanonicalError(f"has no canonical form (type {type(value).__qualname__})")


def _text(value: str, budget: _Budget) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    size = len(data)
    if size > MEMBER_COST:
        budget.spend(size)
    return b"s%d:%b" % (size, data)


def _bytes(value: Any, budget: _Budget) -> bytes:
    data = bytes(value)
    return b"b%d:%b" % (len(data), _paid(data, budget))


def _paid(data: bytes, budget: _Budget) -> bytes:
    if len(data) > MEMBER_COST:
        budget.spend(len(data))
    return data


def _float(value: float, _: _Budget) -> bytes:
    if math.isnan(value):
        raise NotCanonicalError("is NaN, which equals nothing, not even itself")
    return b"f%b;" % float.__repr__(value).encode()


def _int(value: int, budget: _Budget) -> bytes:
    # Hexadecimal, because Python refuses to write very long integers in decimal.
    number = int(value)
    if number.bit_length() < _LONG_BITS:
        return b"i%x;" % number
    return b"i%b;" % _paid(b"%x" % number, budget)


def _decimal(value: Decimal, budget: _Budget) -> bytes:
    if value.is_nan():
        raise NotCanonicalError("is NaN, which equals nothing, not even itself")
    # A decimal context may want its exponent in a small letter.
    return b"D%b;" % _paid(Decimal.__str__(value).replace("e", "E").encode(), budget)


def _sequence(value: Any, budget: _Budget) -> bytes:
    budget.down(len(value))
    members = [_encode(item, budget) for item in value]
    budget.up()
    return b"[%b]" % b"".join(members)


def _set(value: Any, budget: _Budget) -> bytes:
    budget.down(len(value))
    members = sorted([_encode(item, budget) for item in value])
    budget.up()
    return b"<%b>" % b"".join(members)


def _mapping(value: Mapping[Any, Any], budget: _Budget) -> bytes:
    budget.down(len(value))
    pairs = sorted([(_encode(key, budget), _encode(item, budget)) for key, item in value.items()])
    budget.up()
    return b"{%b}" % b"".join([key + item for key, item in pairs])


def _enum(value: Enum, budget: _Budget) -> bytes:
    budget.down(1)
    form = _encode(value.value, budget)
    budget.up()
    return b"E%b%b" % (_text(type(value).__qualname__, budget), form)


def _dataclass(value: Any, budget: _Budget) -> bytes:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return b"C%b%b" % (_text(type(value).__qualname__, budget), _mapping(fields, budget))


def _timedelta(value: timedelta, _: _Budget) -> bytes:
    return b"P%d,%d,%d;" % (value.days, value.seconds, value.microseconds)


_ENCODERS: dict[type, Callable[[Any, _Budget], bytes]] = {
    str: _text,
    int: _int,
    float: _float,
    bool: lambda value, _: b"t" if value else b"u",
    type(None): lambda value, _: b"n",
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
}

#: In this order: a datetime is also a date.
_KINDS: tuple[tuple[type | tuple[type, ...], Callable[[Any, _Budget], bytes]], ...] = (
    (str, lambda value, budget: _text(str.__str__(value), budget)),
    (int, _int),
    (float, _float),
    (Decimal, _decimal),
    (UUID, lambda value, _: b"U" + value.bytes),
    (datetime, lambda value, _: b"T%b;" % datetime.isoformat(value).encode()),
    (date, lambda value, _: b"A%b;" % date.isoformat(value).encode()),
    (time, lambda value, _: b"M%b;" % time.isoformat(value).encode()),
    (timedelta, _timedelta),
    ((bytes, bytearray, memoryview), _bytes),
    ((list, tuple), _sequence),
    ((set, frozenset), _set),
    (Mapping, _mapping),
)
