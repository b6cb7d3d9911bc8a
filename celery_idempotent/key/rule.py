"""Key rules: all arguments, a template, some arguments by name, a callable, or the task's id."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import Signature
from string import Formatter
from typing import Any, Final
from uuid import UUID

from celery_idempotent.errors import KeyRuleError, SettingsError
from celery_idempotent.key.canonical import NotCanonicalError, canonical
from celery_idempotent.key.explanation import Explanation
from celery_idempotent.key.key import Key, fingerprint_of
from celery_idempotent.key.parameters import Parameters


class _TaskId:
    def __repr__(self) -> str:
        return "celery_idempotent.TASK_ID"


#: Rule under which only copies of one message are duplicates, as a periodic task wants it.
TASK_ID: Final = _TaskId()

Normalise = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]


class KeyRule:
    """One task's rule, checked against its signature and ready to derive keys.

    Args:
        task: the task's name; equal rules of different tasks never share a key.
        rule: the value of ``idempotency_key``.
        signature: of what the task runs, without ``self``.
        normalise: what the task's serializer makes of arguments on their way to the worker.

    Raises:
        SettingsError: if the rule is of no known kind, or names an argument the task lacks.
    """

    def __init__(self, task: str, rule: Any, signature: Signature, normalise: Normalise) -> None:
        self._task = task
        self._rule = rule
        self._normalise = normalise
        self._parameters = Parameters(signature, lambda value: normalise((value,), {})[0][0])
        self._form = self._compile(rule)

    def derive(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str | None = None,
        explicit: str | None = None,
    ) -> Key:
        """The key of a call; `explicit` is the key that the call itself carries.

        Raises:
            KeyRuleError: naming the task and the argument, never what it holds.
            TypeError: if the arguments do not fit the task, as calling it would.
        """
        return Key.of(self._task, *self._forms(args, kwargs, task_id, explicit))

    def explain(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str | None = None,
        explicit: str | None = None,
    ) -> Explanation:
        """How :meth:`derive` comes to its key; raises what that would raise."""
        form, fingerprint = self._forms(args, kwargs, task_id, explicit)
        by_id = self._rule is TASK_ID and explicit is None
        bound = {} if by_id else self._parameters.bind(*self._normalise(args, kwargs))
        references = None
        if explicit is not None or self._rule is TASK_ID:
            references = frozenset[str]()
        elif isinstance(self._rule, str):
            references = frozenset(_names_in(self._rule))
        elif isinstance(self._rule, (tuple, list)):
            references = frozenset(self._rule)
        elif self._rule is None:
            references = frozenset(name.lstrip("*") for name in bound)
        return Explanation(
            rule="idempotency_key of the call" if explicit is not None else _in_words(self._rule),
            arguments=tuple(self._parameters.explain(bound, references)),
            form=form,
            key=Key.of(self._task, form, fingerprint),
        )

    def _forms(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        task_id: str | None,
        explicit: str | None,
    ) -> tuple[bytes, bytes]:
        """What makes the key, and the fingerprint."""
        if self._rule is TASK_ID and explicit is None:
            return b"task-id" + canonical(task_id), b""
        args, kwargs = self._normalise(args, kwargs)
        bound = self._parameters.bind(args, kwargs)
        if explicit is None and self._form is None:
            return b"arguments" + self._parameters.forms(bound, self._refuse), b""
        fingerprint = fingerprint_of(self._parameters.forms(bound, _type_only))
        if explicit is not None:
            return self._text(explicit, "idempotency_key"), fingerprint
        assert self._form is not None
        return self._form(bound, args, kwargs), fingerprint

    def of_text(self, text: Any) -> Key:
        """The key that a call carried itself, for looking its record up."""
        return Key.of(self._task, self._text(text, "idempotency_key"))

    def _compile(self, rule: Any) -> Callable[..., bytes] | None:
        if rule is None or rule is TASK_ID:
            return None
        if isinstance(rule, str):
            return _Template(self, rule).form
        if isinstance(rule, (tuple, list)) and rule and all(isinstance(n, str) for n in rule):
            self.check_names(rule)
            return lambda bound, args, kwargs: self._named(rule, bound)
        if callable(rule):
            return lambda bound, args, kwargs: self._called(rule, args, kwargs)
        raise SettingsError(
            f"{self._task}: idempotency_key must be None, a template, a tuple of argument names, "
            f"a callable or TASK_ID, not {type(rule).__name__}"
        )

    @property
    def task(self) -> str:
        """The task's name."""
        return self._task

    @property
    def signature(self) -> Signature:
        """What the task takes."""
        return self._parameters.signature

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse a rule that names an argument which no call can have."""
        for name in names:
            if not self._parameters.accepts(name):
                takes = ", ".join(self._parameters.signature.parameters) or "none"
                raise SettingsError(
                    f"{self._task}: idempotency_key names {name!r}, which the task does not take "
                    f"(it takes: {takes})"
                )

    def values(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument that a rule may speak of, by name."""
        return self._parameters.with_defaults(bound)

    def _named(self, names: Sequence[str], bound: Mapping[str, Any]) -> bytes:
        values = self.values(bound)
        forms = []
        for name in names:
            if name not in values:
                raise KeyRuleError(f"{self._task}: idempotency_key needs argument {name!r}")
            try:
                forms.append(canonical(values[name]))
            except NotCanonicalError as error:
                self._refuse(name, error)
        return b"named" + b"".join(forms)

    def _called(
        self, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bytes:
        try:
            value = rule(*args, **kwargs)
        except Exception as error:
            # Not its message: that may quote an argument.
            raise KeyRuleError(
                f"{self._task}: idempotency_key raised {type(error).__name__}; it must give a key "
                "for every call, or the call carry its own"
            ) from error
        return self._text(value, "what idempotency_key returned")

    def _text(self, value: Any, name: str) -> bytes:
        """The form of a key given as a value: a number or a UUID is the same key as its text."""
        if value is None or isinstance(value, bool) or (hasattr(value, "__len__") and not value):
            raise KeyRuleError(
                f"{self._task}: {name} is {_kind(value)}, which is no key; it must be text, a "
                "number, a UUID or a tuple of these"
            )
        try:
            return b"key" + canonical(as_text(value))
        except NotCanonicalError as error:
            raise KeyRuleError(
                f"{self._task}: {name} {error}; it must be text, a number, a UUID or a tuple of "
                "these"
            ) from None

    def _refuse(self, name: str, error: NotCanonicalError) -> bytes:
        raise KeyRuleError(
            f"{self._task}: argument {name!r} {error}; give the task an idempotency_key that "
            "leaves it out"
        ) from None


class _Template:
    """``"order:{order_id}"``: fields as in :meth:`str.format`, by name.

    The key is the formatted text. Where that alone would be ambiguous (``{a}:{b}`` with a colon
    inside a value), the lengths of the values go in too, so different values never share a key.
    """

    _formatter = Formatter()

    def __init__(self, rule: KeyRule, template: str) -> None:
        self._rule = rule
        try:
            self._pieces = tuple(self._formatter.parse(template))
        except ValueError as error:
            raise SettingsError(f"{rule.task}: idempotency_key {template!r}: {error}") from None
        fields = [field for _, field, _, _ in self._pieces if field is not None]
        if not fields:
            raise SettingsError(
                f"{rule.task}: idempotency_key {template!r} has no field, so every call would "
                "share one key; write the argument that matters in braces"
            )
        names = [_first_name(field) for field in fields]
        if any(not name or name.isdigit() for name in names):
            raise SettingsError(
                f"{rule.task}: idempotency_key {template!r}: name the argument in each field"
            )
        if any(conversion not in (None, "r", "s", "a") for _, _, _, conversion in self._pieces):
            raise SettingsError(
                f"{rule.task}: idempotency_key {template!r}: a conversion is !s, !r or !a"
            )
        if any("{" in (spec or "") for _, _, spec, _ in self._pieces):
            raise SettingsError(
                f"{rule.task}: idempotency_key {template!r}: a field inside a format is too clever"
            )
        rule.check_names(names)
        self._separators = self._between_fields()

    def _between_fields(self) -> tuple[str, ...]:
        literals = [literal for literal, field, _, _ in self._pieces if field is not None]
        return tuple(literals[1:])

    def form(self, bound: Mapping[str, Any], args: Sequence[Any], kwargs: Any) -> bytes:
        values = self._rule.values(bound)
        text, parts = [], []
        for literal, field, spec, conversion in self._pieces:
            text.append(literal)
            if field is not None:
                parts.append(self._part(field, spec or "", conversion, values))
                text.append(parts[-1])
        form = b"key" + canonical("".join(text))
        return form + canonical([len(part) for part in parts]) if self._ambiguous(parts) else form

    def _ambiguous(self, parts: Sequence[str]) -> bool:
        if not all(self._separators):
            return True
        letters = set().union(*self._separators)
        return any(not letters.isdisjoint(part) for part in parts)

    def _part(
        self, field: str, spec: str, conversion: str | None, values: Mapping[str, Any]
    ) -> str:
        try:
            value, _ = self._formatter.get_field(field, (), values)
            if isinstance(value, Enum) and isinstance(value, (str, int)):
                value = value.value  # whose text is the same in all Pythons
            _require_text_of_its_own(value, conversion)
            if conversion:
                value = self._formatter.convert_field(value, conversion)
            return format(value, spec)
        except Exception as error:
            raise KeyRuleError(
                f"{self._rule.task}: idempotency_key cannot fill {{{field}}}: "
                f"{error if isinstance(error, NotCanonicalError) else type(error).__name__}"
            ) from None


def as_text(value: Any) -> Any:
    """A number or a UUID as text, all else as it is; an IntEnum's own differs between Pythons."""
    if isinstance(value, int):
        return int.__repr__(value)
    return str(value) if isinstance(value, UUID) else value


def _require_text_of_its_own(value: Any, conversion: str | None) -> None:
    """Refuse what prints a memory address, or its members in any order: no two callers agree."""
    kind: Any = type(value)
    if isinstance(value, (list, tuple)):
        for item in value:
            _require_text_of_its_own(item, "r")
    elif conversion in (None, "s") and kind.__str__ is not object.__str__:
        return
    elif isinstance(value, (set, frozenset, Mapping)) or dataclasses.is_dataclass(value):
        raise NotCanonicalError(f"a {kind.__name__} has no text of its own")
    else:
        canonical(value)


def _type_only(name: str, error: NotCanonicalError) -> bytes:
    """Where the rule leaves an argument out of the key, it may be of any type."""
    return b"?"


def _first_name(field: str) -> str:
    return field.replace("[", ".").split(".", 1)[0]


def _names_in(template: str) -> list[str]:
    """The arguments that a template speaks of."""
    return [_first_name(field) for _, field, _, _ in Formatter().parse(template) if field]


def _in_words(rule: Any) -> str:
    if rule is None:
        return "all arguments"
    if rule is TASK_ID:
        return "TASK_ID: the id of the message"
    if isinstance(rule, str):
        return f"the template {rule!r}"
    if isinstance(rule, (tuple, list)):
        return f"the arguments {', '.join(rule)}"
    return f"the callable {getattr(rule, '__qualname__', type(rule).__name__)}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"{value}" if isinstance(value, bool) else "empty"
