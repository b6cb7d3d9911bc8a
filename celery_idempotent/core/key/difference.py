"""Names the argument in which a call differs from another one with the same key.

`describe` is called for the text of a KeyReusedError. The record has a fingerprint of the other
call's arguments, not the arguments themselves, so they are guessed: if one argument with another
type, or without being passed, gives that fingerprint, it is the one that differs. Otherwise all
arguments that the key does not determine are named. The text contains no values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any
from uuid import UUID

from celery_idempotent.core.key import fingerprint_of
from celery_idempotent.core.key.parameters import Parameters

#: Types whose values are easily confused.
_SIMILAR = (int, float, str, bool, Decimal, UUID)


def describe(
    parameters: Parameters, bound: Mapping[str, Any], fixed: Collection[str], fingerprint: bytes
) -> str:
    """Describes the argument that differs, or those that may; empty if none.

    Args:
        bound: the arguments of this call.
        fixed: names of the arguments whose whole value is in the key, so only their type may
            differ.
        fingerprint: the fingerprint of the other call.
    """

    def matches(values: Mapping[str, Any]) -> bool:
        return fingerprint_of(parameters.encode(values, lambda *_: b"?")) == fingerprint

    for name, value in bound.items():
        for twin in _twins(value):
            if matches({**bound, name: twin}):
                was, now = type(twin).__name__, type(value).__name__
                return f"argument {name!r} was of type {was}, and is of type {now}"
        if matches({n: v for n, v in bound.items() if n != name}):
            return f"argument {name.lstrip('*')!r} was not passed"
    equal = {name for name in fixed if type(bound.get(name)) in _SIMILAR}
    names = [repr(n.lstrip("*")) for n in parameters.entry_names if n not in equal]
    if len(names) > 1:
        return f"one or more of the arguments {', '.join(names)} differ"
    return f"argument {names[0]} differs" if names else ""


def _twins(value: Any) -> Iterator[Any]:
    """Yields the values of other types that equal `value`, or have the same text."""
    for kind in _SIMILAR if type(value) in _SIMILAR else ():
        with suppress(ArithmeticError, AttributeError, TypeError, ValueError):
            twin = kind(value)
            if kind is not type(value) and (twin == value or str(twin) == str(value)):
                yield twin
