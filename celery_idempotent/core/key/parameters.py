"""The arguments of a call: converted by the serializer, bound to parameters, and encoded.

`rule.KeyRule` calls it for every key. The publisher converts the arguments first, because the
worker only has what the serializer restores (JSON turns a tuple into a list), and both must derive
the same key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from kombu import serialization

from celery_idempotent.core.key.canonical import (
    SCALAR_ENCODERS,
    Budget,
    NotCanonicalError,
    canonical,
)

#: Every serializer restores values of exactly these types unchanged, and text without surrogates
#: (JSON decodes two of them as one character).
_SCALARS = frozenset({int, float, bool, type(None)})

#: kombu's JSON decodes a mapping with this key as another type, such as a datetime.
_TYPE_KEY = "__type__"
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
    """Whether every serializer gives back these values as they are, judged by a few types."""
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
                if _TYPE_KEY in value or not all(type(key) is str for key in value):
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


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Argument(NamedTuple):
    """One argument of a call."""

    name: str
    #: The canonical form of its value; None if its type has none.
    canonical_bytes: bytes | None
    #: Whether it equals its default. If so, fingerprints and keys of all arguments leave it out.
    at_default: bool
    #: Whether the rule uses it; None if only the rule's own code knows.
    in_key: bool | None


class Parameters:
    """The parameters of a task's function.

    ``f(1, b=2)``, ``f(1, 2)`` and ``f(a=1, b=2)`` bind to the same mapping. Extra positional
    arguments are one entry under ``*name`` and extra keyword arguments one under ``**name``, so
    neither can be mistaken for a parameter.

    Args:
        signature: of the task's function, without ``self``.
        normalise: returns a value as the task's serializer restores it: a default must equal
            the same value passed explicitly.
    """

    def __init__(self, signature: Signature, normalise: Callable[[Any], Any]) -> None:
        self.signature = signature
        parameters = tuple(signature.parameters.values())
        #: The names that :meth:`bind` may return.
        self.entry_names = tuple(map(entry_name, parameters))
        self._names = frozenset(p.name for p in parameters)
        self._all_named = all(p.kind in _NAMED for p in parameters)
        self._positional = tuple(
            p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD
        )
        self._required = frozenset(
            p.name
            for p in parameters
            if p.default is Parameter.empty
            and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        )
        self._takes_any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        self._defaults = {
            p.name: normalise(p.default) for p in parameters if p.default is not Parameter.empty
        }
        self._encoded_defaults = {
            name: encoded
            for name, value in self._defaults.items()
            if (encoded := _encode_if_possible(value))
        }

    def accepts(self, name: str) -> bool:
        """Returns whether a call can have an argument of this name."""
        return name in self._names or self._takes_any_keyword

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that were passed, by name.

        Raises:
            TypeError: if the call does not fit the signature, as the call itself would.
        """
        if self._all_named and len(args) <= len(self._positional):
            bound = dict(zip(self._positional, args, strict=False))
            if bound.keys().isdisjoint(kwargs) and self._names >= kwargs.keys():
                bound.update(kwargs)
                if self._required <= bound.keys():
                    return bound
        return self._bind_by_signature(args, kwargs)

    def bind_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`bind`, but arguments may be missing."""
        return self._named(self.signature.bind_partial(*args, **kwargs).arguments)

    def missing(self, bound: Mapping[str, Any]) -> list[str]:
        """Returns the required parameters that `bound` lacks, in their order."""
        required = self._required.difference(bound)
        return [name for name in self.signature.parameters if name in required]

    def _bind_by_signature(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return self._named(self.signature.bind(*args, **kwargs).arguments)

    def _named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        parameters = self.signature.parameters
        return {entry_name(parameters[name]): value for name, value in arguments.items()}

    def with_defaults(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every argument that a rule can name, with defaults and extra keywords."""
        values: dict[str, Any] = {}
        for name, value in bound.items():
            if name.startswith("**"):
                values.update(value)
        # A positional-only parameter outranks an extra keyword of the same name.
        values |= self._defaults
        for name, value in bound.items():
            values[name.lstrip("*")] = value
        return values

    def encode(
        self, bound: Mapping[str, Any], on_error: Callable[[str, NotCanonicalError], bytes]
    ) -> bytes:
        """Returns the canonical bytes of all arguments that are not at their default.

        A task can therefore get a new parameter with a default without changing its keys. Defaults
        are compared as canonical bytes, since a message turns a tuple into a list.

        Args:
            on_error: returns the bytes of an argument that cannot be encoded, or raises.
        """
        defaults, encoded_defaults = self._defaults, self._encoded_defaults
        parts: list[bytes] = []
        for name in sorted(bound):
            value = bound[name]
            if name in defaults and value is defaults[name]:
                continue
            try:
                # Scalars, the common case, are encoded directly.
                encode = SCALAR_ENCODERS.get(type(value))
                encoded = encode(value, Budget()) if encode else canonical(value)
            except NotCanonicalError as error:
                encoded = on_error(name, error)
            if name not in encoded_defaults or encoded != encoded_defaults[name]:
                parts += _encode_name(name), encoded
        return b"".join(parts)

    def explain(
        self, bound: Mapping[str, Any], names_in_key: Collection[str] | None
    ) -> Iterator[Argument]:
        """Yields how :meth:`encode` treats each argument of a call.

        Args:
            names_in_key: the arguments that the rule uses; None if unknown.
        """
        for name in (*bound, *(other for other in self._defaults if other not in bound)):
            encoded = _encode_if_possible(bound.get(name, self._defaults.get(name)))
            at_default = name not in bound or encoded == self._encoded_defaults.get(name, b"")
            in_key = None if names_in_key is None else name.lstrip("*") in names_in_key
            yield Argument(name, encoded, at_default, in_key)


@lru_cache(1024)
def _encode_name(name: str) -> bytes:
    return canonical(name)


def entry_name(parameter: Parameter) -> str:
    """Returns the name of a parameter, with the stars of a variadic one."""
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return "*" + parameter.name
    if parameter.kind is Parameter.VAR_KEYWORD:
        return "**" + parameter.name
    return parameter.name


def _encode_if_possible(value: Any) -> bytes | None:
    try:
        return canonical(value)
    except NotCanonicalError:
        return None
