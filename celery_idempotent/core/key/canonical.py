"""Canonical bytes: the same arguments give the same bytes, different ones never do.

Every value has a tag for its type, so ``1``, ``1.0``, ``True`` and ``"1"`` differ. Text and bytes
include their length, so no value can imitate the end of another. Mappings and sets are sorted by
the bytes of their members. Lists and tuples are the same, because messages turn tuples into lists.
Every process, platform and Python version yields the same bytes, which golden keys in the tests
check. `VERSION` is part of every digest in case they must change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from hashlib import blake2b
from typing import Any
from uuid import UUID

VERSION = b"idempotent1"

#: Deeper nesting is rejected: the structure probably contains itself.
MAX_DEPTH = 100
_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"
#: Maximum cost of one value: text costs its bytes, each member of a structure `MEMBER_COST`.
#: Without a limit, sixty nested lists that each hold the next one twice, which a small pickle can
#: describe, would be encoded as 2**60 members.
MAX_COST = 64 * 1024 * 1024
MEMBER_COST = 64
#: An integer of fewer bits costs no more than a member, even with its sign.
_LONG_BITS = 4 * (MEMBER_COST - 1)
_TOO_LARGE = f"is larger than {MAX_COST >> 20} MiB, or has more than a million members"


class NotCanonicalError(TypeError):
    """The value cannot be encoded. The message never shows the value."""


def digest(data: bytes, size: int) -> bytes:
    """Returns `size` bytes of BLAKE2b over `data`, distinct from other uses of that hash."""
    return blake2b(data, digest_size=size, person=VERSION).digest()


def canonical(value: Any) -> bytes:
    """Returns the canonical bytes of `value`.

    Raises:
        NotCanonicalError: for a type that has none, for NaN, for nesting deeper than `MAX_DEPTH`
            and for values that cost more than `MAX_COST`.
    """
    try:
        return (_ENCODERS.get(type(value)) or _encoder_of(value))(value, Budget())
    except NotCanonicalError:
        raise
    except RecursionError:
        # Within `MAX_DEPTH`, but the caller's own frames have nearly used up Python's stack.
        raise NotCanonicalError(_TOO_DEEP) from None
    except Exception as error:
        # A type of the application raised it. Its message may quote a value, so it is not shown.
        raise NotCanonicalError(f"cannot be read ({type(error).__name__})") from None


def has_canonical_bytes(kind: type) -> bool:
    """Returns whether values of this type can be encoded, judging by the type alone.

    A base class such as ``object`` also counts, since a value that is declared as one may be of a
    subclass that can be encoded.
    """
    inherits = issubclass(kind, (Enum, *(base for base, _ in _ENCODERS_OF_BASES)))
    may_be = kind is Any or any(issubclass(each, kind) for each in _ENCODERS)
    return inherits or may_be or is_dataclass(kind)


class Budget:
    """How deep one value is nested, and how many bytes it costs, while it is encoded."""

    # Class attributes, not set in __init__: a scalar, the most frequent value, uses neither.
    depth = 0
    cost = 0

    def spend(self, cost: int) -> None:
        self.cost += cost
        if self.cost > MAX_COST:
            raise NotCanonicalError(_TOO_LARGE)

    def enter(self, members: int) -> None:
        """Begins to encode the members of a structure."""
        self.spend(members * MEMBER_COST)
        self.depth += 1
        if self.depth > MAX_DEPTH and members:
            raise NotCanonicalError(_TOO_DEEP)

    def leave(self) -> None:
        self.depth -= 1


def _encode(value: Any, budget: Budget) -> bytes:
    encode = _ENCODERS.get(type(value)) or _encoder_of(value)
    return encode(value, budget)


def _encoder_of(value: Any) -> Callable[[Any, Budget], bytes]:
    """Returns the encoder of an Enum, a dataclass, or an instance of a subclass."""
    if isinstance(value, Enum):
        return _enum
    for base, encode in _ENCODERS_OF_BASES:
        if isinstance(value, base):
            return encode
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass
    raise NotCanonicalError(f"has no canonical form (type {type(value).__qualname__})")


def _text(value: str, budget: Budget) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    size = len(data)
    if size > MEMBER_COST:
        budget.spend(size)
    return b"s%d:%b" % (size, data)


def _bytes(value: Any, budget: Budget) -> bytes:
    data = bytes(value)
    return b"b%d:%b" % (len(data), _charge(data, budget))


def _charge(data: bytes, budget: Budget) -> bytes:
    """Returns `data`, after charging for it if it is longer than what a member costs anyway."""
    if len(data) > MEMBER_COST:
        budget.spend(len(data))
    return data


def _float(value: float, _: Budget) -> bytes:
    if math.isnan(value):
        raise NotCanonicalError("is NaN, which equals nothing, not even itself")
    return b"f%b;" % float.__repr__(value).encode()


def _int(value: int, budget: Budget) -> bytes:
    # Hexadecimal, because Python refuses to write very long integers in decimal.
    number = int(value)
    if number.bit_length() < _LONG_BITS:
        return b"i%x;" % number
    return b"i%b;" % _charge(b"%x" % number, budget)


def _decimal(value: Decimal, budget: Budget) -> bytes:
    if value.is_nan():
        raise NotCanonicalError("is NaN, which equals nothing, not even itself")
    # The thread's decimal context (``capitals``) decides whether the exponent is written E or e.
    return b"D%b;" % _charge(Decimal.__str__(value).replace("e", "E").encode(), budget)


def _members(value: Any, budget: Budget) -> list[bytes]:
    budget.enter(len(value))
    members = [_encode(item, budget) for item in value]
    budget.leave()
    return members


def _sequence(value: Any, budget: Budget) -> bytes:
    return b"[%b]" % b"".join(_members(value, budget))


def _set(value: Any, budget: Budget) -> bytes:
    return b"<%b>" % b"".join(sorted(_members(value, budget)))


def _mapping(value: Mapping[Any, Any], budget: Budget) -> bytes:
    budget.enter(len(value))
    pairs = sorted([(_encode(key, budget), _encode(item, budget)) for key, item in value.items()])
    budget.leave()
    return b"{%b}" % b"".join([key + item for key, item in pairs])


def _enum(value: Enum, budget: Budget) -> bytes:
    (member,) = _members([value.value], budget)
    return b"E%b%b" % (_text(type(value).__qualname__, budget), member)


def _dataclass(value: Any, budget: Budget) -> bytes:
    members = {field.name: getattr(value, field.name) for field in fields(value)}
    return b"C%b%b" % (_text(type(value).__qualname__, budget), _mapping(members, budget))


def _timedelta(value: timedelta, _: Budget) -> bytes:
    return b"P%d,%d,%d;" % (value.days, value.seconds, value.microseconds)


_Encoder = Callable[[Any, Budget], bytes]

#: These raise nothing but NotCanonicalError, so `Parameters.encode` calls them directly.
SCALAR_ENCODERS: dict[type, _Encoder] = {
    str: _text,
    int: _int,
    float: _float,
    bool: lambda value, _: b"t" if value else b"u",
    type(None): lambda value, _: b"n",
}

_ENCODERS: dict[type, _Encoder] = {
    **SCALAR_ENCODERS,
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
}

#: The first match is used, so a subclass precedes its base: a datetime is also a date.
_ENCODERS_OF_BASES: tuple[tuple[type | tuple[type, ...], _Encoder], ...] = (
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
