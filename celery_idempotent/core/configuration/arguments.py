"""Converts arguments to those that the worker receives, so that both derive the same key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kombu import serialization

#: Every serializer keeps values of exactly these types, and text that can be encoded: JSON decodes
#: two surrogates as one character.
_SCALARS = frozenset({int, float, bool, type(None)})

_MARK = "__type__"
_SURROGATE = re.compile("[\ud800-\udfff]")

#: Maximum members of lists and mappings to check; a structure may contain itself.
_MAX_MEMBERS = 100_000


def normalised(
    serializer: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dump: Callable[..., Any] | None = None,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns arguments as `serializer` reads them after writing them.

    Plain arguments are returned unchanged, because serializers do not change them. Arguments that
    the serializer cannot write are also returned unchanged: the call may use another serializer, or
    else publisher and worker fail in the same way.

    Args:
        dump: replaces pydantic models as Celery does before publishing; None if Celery does not.
    """
    if not _is_plain(*args, *kwargs.values()):
        with suppress(Exception):
            if dump and serializer != "pickle":
                args, kwargs = dump(args, kwargs)
            content_type, encoding, data = serialization.dumps(
                [list(args), dict(kwargs)], serializer
            )
            args, kwargs = serialization.loads(data, content_type, encoding, accept=[content_type])
    return args, kwargs


def _is_plain(*values: Any) -> bool:
    unchecked = list(values)
    members_left = _MAX_MEMBERS
    while unchecked:
        value = unchecked.pop()
        kind = type(value)
        if kind is list or kind is dict:
            members_left -= len(value)
            if members_left < 0:
                return False
            if kind is dict:
                # kombu's JSON decodes a mapping with this key as another type, such as a datetime.
                if _MARK in value or not all(type(key) is str for key in value):
                    return False
                unchecked += value
                value = value.values()
            unchecked += value
        elif kind is str:
            if not value.isascii() and _SURROGATE.search(value):
                return False
        elif kind not in _SCALARS:
            return False
    return True
