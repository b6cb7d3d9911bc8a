"""Arguments as the worker gets them, so that a key at publish equals the key in the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu import serialization

#: Values of exactly these types come out of every serializer as they went in.
_SCALARS = frozenset({str, int, float, bool, type(None)})


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
        if all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values())):
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


def _is_plain(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind in _SCALARS:
        return True
    if depth > 20:
        return False
    if kind is list:
        return all(_is_plain(item, depth + 1) for item in value)
    if kind is dict:
        return all(type(key) is str and _is_plain(item, depth + 1) for key, item in value.items())
    return False
