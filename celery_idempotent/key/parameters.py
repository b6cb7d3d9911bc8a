"""A task's parameters: binds a call's arguments to them and writes the bound ones canonically."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any

from celery_idempotent.key.canonical import NotCanonicalError, canonical
from celery_idempotent.key.explanation import Argument

_FLAT = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Parameters:
    """What a task's function takes.

    ``f(1, b=2)``, ``f(1, 2)`` and ``f(a=1, b=2)`` bind to the same mapping. Extra positional
    arguments are one entry under ``*name``, extra keyword arguments one under ``**name``, so
    neither can pass for a parameter.

    Args:
        signature: of what the task runs, without ``self``.
        as_sent: what a message makes of a value: a default must equal itself when it is given.
    """

    def __init__(self, signature: Signature, as_sent: Callable[[Any], Any]) -> None:
        self._signature = signature
        parameters = tuple(self._signature.parameters.values())
        self._flat = all(p.kind in _FLAT for p in parameters)
        self._positional = tuple(p.name for p in parameters if p.kind is _FLAT[0])
        self._defaults = {
            p.name: as_sent(p.default) for p in parameters if p.default is not Parameter.empty
        }
        self._required = frozenset(
            p.name for p in parameters if p.kind in _FLAT and p.default is Parameter.empty
        )
        self._names = frozenset(p.name for p in parameters)
        self._default_forms = {
            name: form for name, value in self._defaults.items() if (form := _form_of(value))
        }
        self._takes_any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)

    @property
    def signature(self) -> Signature:
        """As Python sees it."""
        return self._signature

    def accepts(self, name: str) -> bool:
        """Whether a call can have an argument of this name."""
        return name in self._names or self._takes_any_keyword

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The given arguments by name, without those left at their default.

        Raises:
            TypeError: if the call does not fit the signature, as the call itself would.
        """
        if self._flat and len(args) <= len(self._positional):
            bound = dict(zip(self._positional, args, strict=False))
            if bound.keys().isdisjoint(kwargs) and self._names >= kwargs.keys():
                bound.update(kwargs)
                if self._required <= bound.keys():
                    return bound
        return self._bind_by_python(args, kwargs)

    def _bind_by_python(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = self._signature.bind(*args, **kwargs).arguments
        kinds = self._signature.parameters
        return {_entry_name(kinds[name]): value for name, value in arguments.items()}

    def with_defaults(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Every name that a rule may speak of, the defaults and extra keywords included."""
        names: dict[str, Any] = {}
        for name, value in bound.items():
            if name.startswith("**"):
                names.update(value)
        # A parameter outranks an extra keyword of its name, which may stand beside one that is
        # positional only.
        return names | self._defaults | {name.lstrip("*"): value for name, value in bound.items()}

    def forms(
        self, bound: Mapping[str, Any], instead: Callable[[str, NotCanonicalError], bytes]
    ) -> bytes:
        """Canonical bytes of all arguments.

        An argument at its default takes no part, so a new parameter with a default changes no
        key. The comparison is of canonical forms: a message turns a tuple into a list.
        `instead` gives the bytes for an argument that has no canonical form, or raises.
        """
        defaults, default_forms = self._defaults, self._default_forms
        parts: list[bytes] = []
        for name in sorted(bound):
            value = bound[name]
            if name in defaults and value is defaults[name]:
                continue
            try:
                form = canonical(value)
            except NotCanonicalError as error:
                form = instead(name, error)
            if name not in default_forms or form != default_forms[name]:
                parts += _name_form(name), form
        return b"".join(parts)

    def explain(
        self, bound: Mapping[str, Any], references: Collection[str] | None
    ) -> Iterator[Argument]:
        """What becomes of each argument of a call; see :meth:`forms`.

        Args:
            speaks_of: the names that the key is made of; None where that cannot be told.
        """
        for name in (*bound, *(other for other in self._defaults if other not in bound)):
            given = bound.get(name, self._defaults.get(name))
            form = _form_of(given)
            at_default = name not in bound or form == self._default_forms.get(name, b"")
            in_key = None if references is None else name.lstrip("*") in references
            yield Argument(name, form, at_default, in_key)


@lru_cache(1024)
def _name_form(name: str) -> bytes:
    return canonical(name)


def _entry_name(parameter: Parameter) -> str:
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return "*" + parameter.name
    if parameter.kind is Parameter.VAR_KEYWORD:
        return "**" + parameter.name
    return parameter.name


def _form_of(default: Any) -> bytes | None:
    try:
        return canonical(default)
    except NotCanonicalError:
        return None
