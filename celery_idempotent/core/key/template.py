"""Templates of keys and labels: ``"order:{order_id}"``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from string import Formatter
from typing import Any

from celery_idempotent.core.key import KEY_OPTION
from celery_idempotent.core.key.canonical import NotCanonicalError, canonical
from celery_idempotent.errors import KeyRuleError, SettingsError


class Template:
    """A template with fields as in :meth:`str.format`, by name.

    The key is the formatted text. If that alone would be ambiguous (``{a}:{b}`` with a colon inside
    a value), the lengths of the values are hashed too: values with different texts share no key.

    Args:
        option: the one with the template, for errors.

    Raises:
        SettingsError: if the template cannot be filled.
    """

    _formatter = Formatter()

    def __init__(self, task: str, template: str, option: str = KEY_OPTION) -> None:
        self._subject = f"{task}: {option}"
        where = f"{self._subject} {template!r}"
        try:
            self._pieces = tuple(self._formatter.parse(template))
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from None
        fields = [field for _, field, _, _ in self._pieces if field is not None]
        if not fields:
            raise SettingsError(
                f"{where} has no field, so it would be the same for every call; write the argument "
                "that matters in braces"
            )
        #: The arguments that the template uses.
        self.names = [*map(_name_of, fields)]
        #: Those arguments with a field without attribute, index and format, so that the text
        #: contains their whole value.
        self.whole = [
            field for _, field, spec, _ in self._pieces if field in self.names and not spec
        ]
        if any(not name or name.isdigit() for name in self.names):
            raise SettingsError(f"{where}: name the argument in each field")
        if any(conversion not in (None, "r", "s", "a") for _, _, _, conversion in self._pieces):
            raise SettingsError(f"{where}: unknown conversion; use !s, !r or !a")
        if any("{" in (spec or "") for _, _, spec, _ in self._pieces):
            raise SettingsError(f"{where}: nested format fields are not supported")
        literals = [literal for literal, field, _, _ in self._pieces if field is not None]
        self._separators = literals[1:]

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """Returns the canonical bytes of the template filled with `values`.

        Raises:
            KeyRuleError: naming the field that cannot be filled.
        """
        text, filled = self.fill(values)
        encoded = b"key" + canonical(text)
        if self._separators and self._is_ambiguous(filled):
            encoded += canonical([len(part) for part in filled])
        return encoded

    def fill(self, values: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Returns the template filled with `values`, and the text of each field.

        Raises:
            KeyRuleError: naming the field that cannot be filled.
        """
        text, filled = [], []
        for literal, field, spec, conversion in self._pieces:
            text.append(literal)
            if field is not None:
                value = values.get(field)
                is_small = type(value) is int and value.bit_length() < 64
                if not (is_small or type(value) is str) or spec or conversion:
                    value = self._fill(field, spec or "", conversion, values)
                filled.append(str(value))
                text.append(filled[-1])
        return "".join(text), filled

    def _is_ambiguous(self, filled: Sequence[str]) -> bool:
        """Whether other values may give the same text: fields touch, or a value has a separator."""
        if not all(self._separators):
            return True
        letters = set().union(*self._separators)
        return any(not letters.isdisjoint(part) for part in filled)

    def _fill(
        self, field: str, spec: str, conversion: str | None, values: Mapping[str, Any]
    ) -> str:
        try:
            value, _ = self._formatter.get_field(field, (), values)
            if isinstance(value, Enum) and isinstance(value, (str, int)):
                value = value.value  # its text is the same in all Python versions
            _check_text_is_stable(value, conversion)
            if conversion:
                value = self._formatter.convert_field(value, conversion)
            return format(value, spec)
        except NotCanonicalError as error:
            raise KeyRuleError(f"{self._subject} cannot fill {{{field}}}: {error}") from None
        except Exception as error:
            # Only its type is shown, since its message may quote an argument.
            name, reason = _name_of(field), type(error).__name__
            if name in values:
                reason += f" ({name!r} is of type {type(values[name]).__qualname__})"
            raise KeyRuleError(f"{self._subject} cannot fill {{{field}}}: {reason}") from error


def _name_of(field: str) -> str:
    """Returns the argument that a field uses."""
    return field.replace("[", ".").split(".", 1)[0]


def _check_text_is_stable(value: Any, conversion: str | None) -> None:
    """Rejects a value whose text holds a memory address or has no fixed order."""
    kind: Any = type(value)
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_text_is_stable(item, "r")
    elif conversion in (None, "s") and kind.__str__ is not object.__str__:
        return
    elif isinstance(value, (set, frozenset, Mapping)) or dataclasses.is_dataclass(value):
        raise NotCanonicalError(f"the text of a {kind.__name__} differs between processes")
    else:
        canonical(value)
