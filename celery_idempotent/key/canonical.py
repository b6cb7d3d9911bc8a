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


class NotCanonicalError(TypeError):
    """The value has no canonical form; says which type, never what it holds."""


def digest(data: bytes, size: int) -> bytes:
    """`size` bytes of BLAKE2b over `data`, kept apart from every other use of that hash."""
    return blake2b(data, digest_size=size, person=VERSION).digest()


def canonical(value: Any) -> bytes:
    """The canonical bytes of `value`.

    Raises:
        NotCanonicalError: for a type that has none, for NaN, and for nesting beyond `MAX_DEPTH`.
    """
    try:
        return _encode(value, 0)
    except RecursionError:
        # The caller stood deep in its own stack already.
        raise NotCanonicalError(_TOO_DEEP) from None


def _encode(value: Any, depth: int) -> bytes:
    encode = _ENCODERS.get(type(value)) or _encoder_of(value)
    if depth > MAX_DEPTH:
        raise NotCanonicalError(_TOO_DEEP)
    return encode(value, depth)


def _encoder_of(value: Any) -> Callable[[Any, int], bytes]:
    """The encoder for an instance of a subclass, or of a kind rather than a type."""
    if isinstance(value, Enum):
        return _enum
    for kind, encode in _KINDS:
        if isinstance(value, kind):
            return encode
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass
    raise NotCanonicalError(f"has no canonical form (type {type(value).__qualname__})")


def _text(value: str, _: int = 0) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"s%d:%b" % (len(data), data)


def _bytes(value: Any, _: int) -> bytes:
    data = bytes(value)
    return b"b%d:%b" % (len(data), data)


def _float(value: float, _: int) -> bytes:
    if math.isnan(value):
        raise NotCanonicalError("is NaN, which equals nothing, not even itself")
    return b"f%b;" % float.__repr__(value).encode()


def _int(value: int, _: int) -> bytes:
    # Hexadecimal, because Python refuses to write very long integers in decimal.
    return b"i%b;" % format(int(value), "x").encode()


def _decimal(value: Decimal, _: int) -> bytes:
    if value.is_nan():
        raise NotCanonicalError("is NaN, which equals nothing, not even itself")
    return b"D%b;" % Decimal.__str__(value).encode()


def _sequence(value: Any, depth: int) -> bytes:
    return b"[%b]" % b"".join(_encode(item, depth + 1) for item in value)


def _set(value: Any, depth: int) -> bytes:
    return b"<%b>" % b"".join(sorted(_encode(item, depth + 1) for item in value))


def _mapping(value: Mapping[Any, Any], depth: int) -> bytes:
    pairs = sorted(
        (_encode(key, depth + 1), _encode(item, depth + 1)) for key, item in value.items()
    )
    return b"{%b}" % b"".join(key + item for key, item in pairs)


def _enum(value: Enum, depth: int) -> bytes:
    return b"E%b%b" % (_text(type(value).__qualname__), _encode(value.value, depth + 1))


def _dataclass(value: Any, depth: int) -> bytes:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return b"C%b%b" % (_text(type(value).__qualname__), _mapping(fields, depth))


def _timedelta(value: timedelta, _: int) -> bytes:
    return b"P%d,%d,%d;" % (value.days, value.seconds, value.microseconds)


_ENCODERS: dict[type, Callable[[Any, int], bytes]] = {
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
_KINDS: tuple[tuple[type | tuple[type, ...], Callable[[Any, int], bytes]], ...] = (
    (str, lambda value, _: _text(str.__str__(value))),
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
