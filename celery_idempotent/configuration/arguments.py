"""Arguments as the worker gets them, so that a key at publish equals the key in the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu import serialization

#: Values of exactly these types come out of every serializer as they went in, and so does text
#: that can be encoded: JSON makes one letter of two surrogates.
_SCALARS = frozenset({int, float, bool, type(None)})

_MARK = "__type__"

#: Members of lists and mappings that are looked at; one that contains itself has no end of them.
_LOOKS = 100_000


def normaliser(
    serializer: str,
) -> Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]:
    """A function that sends arguments through `serializer` and back, where that may matter.

    Arguments that the serializer cannot write stay as they are: the call itself may use another
    serializer, and then both sides meet the same difficulty here.
    """

    def normalise(
        args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if _is_plain(*args, *kwargs.values()):
            return args, kwargs
        try:
            content_type, encoding, data = serialization.dumps(
                [list(args), dict(kwargs)], serializer
            )
            args, kwargs = serialization.loads(data, content_type, encoding, accept=[content_type])
        except Exception:
            return args, kwargs
        return args, kwargs

    return normalise


def _is_plain(*values: Any) -> bool:
    left = list(values)
    looks = _LOOKS
    while left:
        value = left.pop()
        kind = type(value)
        if kind is list or kind is dict:
            looks -= len(value)
            if looks < 0:
                return False
            if kind is dict:
                # Marked so, kombu's JSON takes a mapping for a value of its own: a datetime, say.
                if _MARK in value or not all(type(key) is str for key in value):
                    return False
                left += value
                value = value.values()
            left += value
        elif kind is str:
            if not (value.isascii() or _is_encodable(value)):
                return False
        elif kind not in _SCALARS:
            return False
    return True


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
