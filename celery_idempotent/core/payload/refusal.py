"""Names the part of a value that its serializer refuses, by type only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery_idempotent.core.record import Payload

#: How deep a value is searched for the part that cannot be serialized.
_MAX_DEPTH = 20


def refusal(
    value: Any, round_trip: Callable[[Any], object], does: str, error: Exception
) -> Payload:
    """Returns a payload without a value, whose body is the reason.

    Args:
        round_trip: serializes and restores a part of `value`.
        does: the serializer, and what it cannot do.

    Raises:
        Exception: `error`, if a signal handler has raised it, and not the serializer.
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
    part = value
    for _ in range(_MAX_DEPTH):
        parts = _parts_of(part)
        if not parts or not fails([each for _, each in parts]):
            break
        while len(parts) > 1:
            half = parts[: len(parts) // 2]
            parts = half if fails([each for _, each in half]) else parts[len(half) :]
        ((key, part),) = parts
        if key is not None:
            return f"{_type_name(key[0])} as a key, inside a value of type {_type_name(value)}"
    if part is value:
        return _type_name(value)
    return f"{_type_name(part)}, inside a value of type {_type_name(value)}"


def _parts_of(value: Any) -> list[tuple[tuple[Any] | None, Any]]:
    """Returns the members of `value`, and each key of a mapping in a mapping of its own."""
    if isinstance(value, Mapping):
        members = [(None, member) for member in value.values()]
        return [*members, *(((key,), {key: None}) for key in value)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(None, member) for member in value]
    return []


def _type_name(value: Any) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__
