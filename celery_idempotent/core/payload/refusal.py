"""Finds the part of a value that the serializer refuses, and names its type.

The outcome is then stored without a value, and this text is the reason that duplicates get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from celery_idempotent.core.record import Payload

#: How deep, and how far in each container, a value is searched for the part that cannot be
#: serialized.
_MAX_DEPTH, _MAX_MEMBERS = 20, 10_000


def refusal(
    value: Any, round_trip: Callable[[Any], object], does: str, error: Exception
) -> Payload:
    """Returns a payload without a value, whose body is the reason.

    Args:
        round_trip: serializes and restores a part of `value`.
        does: the serializer, and what it cannot do.

    Raises:
        Exception: `error`, if the serializer accepts `value` now: then a signal handler raised it.
    """

    def fails(part: Any) -> bool:
        try:
            round_trip(part)
        except Exception:
            return True
        return False

    if not fails(value):
        raise error
    try:
        found = _describe(value, fails)
    except Exception:  # raised by a type of the application
        found = _type_name(value)
    return Payload("", f"{does} the type {found}".encode("utf-8", "backslashreplace"))


def _describe(value: Any, fails: Callable[[Any], bool]) -> str:
    """Describes the innermost part of `value` that `fails`, only by type."""
    part, inside = value, f", inside a value of type {_type_name(value)}"
    for _ in range(_MAX_DEPTH):
        members: Any = part if isinstance(part, (list, tuple, set, frozenset)) else ()
        if isinstance(part, Mapping):
            for key in islice(part, _MAX_MEMBERS):
                if fails({key: None}):
                    return f"{_type_name(key)} as a key{inside}"
            members = part.values()
        found = next(filter(fails, islice(members, _MAX_MEMBERS)), part)
        if found is part:
            break
        part = found
    return _type_name(part) + ("" if part is value else inside)


def _type_name(value: Any) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__
