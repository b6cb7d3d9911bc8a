"""Key rules: all arguments, a template, some arguments by name, a callable, or the task's id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature
from typing import Any, Final, NamedTuple

from celery_idempotent.core.key import KEY_OPTION, KINDS, Key, as_text, fingerprint_of
from celery_idempotent.core.key.canonical import NotCanonicalError, canonical
from celery_idempotent.core.key.parameters import Argument, Parameters
from celery_idempotent.core.printable import did_you_mean
from celery_idempotent.errors import KeyRuleError, SettingsError


class _TaskId:
    def __repr__(self) -> str:
        return "celery_idempotent.TASK_ID"


#: With this rule, only copies of one message are duplicates, as periodic tasks need.
TASK_ID: Final = _TaskId()

_MUST = f"it must be {KINDS}"

#: Returns args and kwargs as the task's serializer passes them to the worker.
Normalise = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Sequence[Any], Mapping[str, Any]]]


class Explanation(NamedTuple):
    """Why two calls share a key or do not: the key, and what it was derived from."""

    #: The rule in words.
    rule: str
    arguments: tuple[Argument, ...]
    #: What was hashed, after the task's name.
    canonical_bytes: bytes
    #: The key; it has no fingerprint if arguments are missing.
    key: Key
    #: Required arguments that were not given, and that the rule does not read.
    missing: Sequence[str] = ()


class KeyRule:
    """One task's rule, checked against its signature, ready to derive keys.

    Args:
        task: the task's name; equal rules of different tasks never share a key.
        rule: the value of the option.
        signature: of the task's function, without ``self``.
        normalise: returns arguments as the task's serializer passes them to the worker.

    Raises:
        SettingsError: if the rule is of an unknown kind, or names an argument the task lacks.
    """

    def __init__(self, task: str, rule: Any, signature: Signature, normalise: Normalise) -> None:
        self.task = task
        self.signature = signature
        #: The value of the option ``key``, as it was set.
        self.source = rule
        self._normalise = normalise
        self._parameters = Parameters(signature, lambda value: normalise((value,), {})[0][0])
        #: The arguments that the rule uses; None for a callable, which may use any.
        self.names: Sequence[str] | None
        #: Arguments whose whole value is in the key if it is a scalar; `_compile` sets them.
        self._fixed: Sequence[str] = ()
        #: The rule in words.
        self.description: str
        self._encode, self.names, self.description = self._compile(rule)

    def derive(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str | None = None,
        explicit_key: Any = None,
    ) -> Key:
        """Returns the key of a call; `explicit_key` is what the caller supplies.

        Raises:
            KeyRuleError: naming the task and the argument, never its value.
            TypeError: if the arguments do not fit the task, as calling it would.
        """
        return self._derive(args, kwargs, task_id, explicit_key)[2]

    def find(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str | None = None,
        explicit_key: Any = None,
    ) -> Key:
        """As :meth:`derive`, for a call of which only the arguments that the rule reads are known.

        If others are missing, the key has no fingerprint.
        """
        return self.explain(args, kwargs, task_id=task_id, explicit_key=explicit_key).key

    def _derive(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], task_id: str | None, explicit_key: Any
    ) -> tuple[Mapping[str, Any], bytes, Key]:
        """Returns the bound arguments (none for a task id), what is hashed, and the key."""
        if self.source is TASK_ID and explicit_key is None:
            hashed = b"task-id" + canonical(task_id)
            return {}, hashed, Key.of(self.task, hashed)
        args, kwargs = self._normalise(args, kwargs)
        bound = self._bind(args, kwargs)
        if self.source is None and explicit_key is None:
            hashed = b"arguments" + self._parameters.encode(bound, self._refuse)
            return bound, hashed, Key.of(self.task, hashed)
        fingerprint = fingerprint_of(self._parameters.encode(bound, _encode_any_type))
        if explicit_key is None:
            hashed = self._encode(bound, args, kwargs)
            return bound, hashed, Key.of(self.task, hashed, fingerprint)
        return bound, *self._explicit(explicit_key, fingerprint)

    def _explicit(self, explicit_key: Any, fingerprint: bytes) -> tuple[bytes, Key]:
        hashed = self._encode_explicit(explicit_key)
        return hashed, Key.of(self.task, hashed, fingerprint, explicit=True)

    def explain(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str | None = None,
        explicit_key: Any = None,
    ) -> Explanation:
        """Explains the key that :meth:`find` returns.

        Raises:
            KeyRuleError: as :meth:`derive`.
            TypeError: if the arguments do not fit the task, or one that the rule reads is missing.
        """
        missing: Sequence[str] = ()
        try:
            bound, hashed, key = self._derive(args, kwargs, task_id, explicit_key)
        except TypeError as error:
            bound, hashed, key = self._derive_from_some(args, kwargs, explicit_key, error)
            missing = self._parameters.missing(bound)
        names, rule = self.names, self.description
        if explicit_key is not None:
            names, rule = (), f"{KEY_OPTION} of the call"
        elif self.source is None:
            names = [name.lstrip("*") for name in bound]
        arguments = tuple(self._parameters.explain(bound, names))
        return Explanation(rule, arguments, hashed, key, missing)

    def _derive_from_some(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        explicit_key: Any,
        error: TypeError,
    ) -> tuple[Mapping[str, Any], bytes, Key]:
        """As :meth:`_derive`, without the arguments that the rule does not read.

        Args:
            error: raised if the rule may read all arguments.
        """
        args, kwargs = self._normalise(args, kwargs)
        bound = self._bind(args, kwargs, self._parameters.bind_partial)
        if explicit_key is not None:
            return bound, *self._explicit(explicit_key, b"")
        if self.source is None or self.names is None:  # a callable may read any argument
            raise error
        for name in self._parameters.missing(bound):
            if name in self.names:
                fit = f"the arguments do not fit {self.task}"
                raise TypeError(f"{fit}: missing a required argument: {name!r}") from None
        hashed = self._encode(bound, args, kwargs)
        return bound, hashed, Key.of(self.task, hashed)

    def _bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        bind: Callable[..., dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        try:
            return (bind or self._parameters.bind)(args, kwargs)
        except TypeError as error:
            names = self.signature.parameters
            hints = (did_you_mean(n, names) for n in kwargs if not self._parameters.accepts(n))
            hint = next(hints, "")
            raise TypeError(f"the arguments do not fit {self.task}: {error}{hint}") from None

    def difference(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key, fingerprint: bytes
    ) -> str:
        """Describes which arguments differ from those of another call; empty if unknown.

        Args:
            key: the key that both calls have.
            fingerprint: the fingerprint of the other call.
        """
        bound = self._bind(*self._normalise(args, kwargs))
        fixed = () if key.explicit else self._fixed
        from celery_idempotent.core.key import difference

        return difference.describe(self._parameters, bound, fixed, fingerprint)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by name, including defaults.

        Raises:
            TypeError: if the arguments do not fit the task, as calling it would.
        """
        args, kwargs = self._normalise(args, kwargs)
        return self._parameters.with_defaults(self._bind(args, kwargs))

    def of_text(self, text: Any) -> Key:
        """Returns the key of calls with the explicit key `text`, without a fingerprint."""
        return self._explicit(text, b"")[1]

    def _compile(
        self, rule: Any
    ) -> tuple[Callable[[Any, Any, Any], bytes], Sequence[str] | None, str]:
        """Returns a rule's encoder, the arguments that it uses (None: unknown) and its text.

        The encoder takes the bound arguments, args and kwargs.
        """
        if rule is None:
            return (lambda *_: b""), (), "all arguments"
        if rule is TASK_ID:
            return (lambda *_: b""), (), "TASK_ID: the id of the message"
        if isinstance(rule, str):
            from celery_idempotent.core.key.template import Template

            encode = (template := Template(self.task, rule)).encode
            self.check_names(template.names)
            self._fixed = template.whole
            with_defaults = self._parameters.with_defaults
            text = f"the template {rule!r}"
            return (lambda bound, *_: encode(with_defaults(bound))), template.names, text
        if isinstance(rule, (tuple, list)) and rule and all(isinstance(n, str) for n in rule):
            self.check_names(rule)
            self._fixed, text = rule, f"the arguments {', '.join(rule)}"
            return (lambda bound, *_: self._encode_named(rule, bound)), rule, text
        if callable(rule):
            text = f"the callable {getattr(rule, '__qualname__', type(rule).__name__)}"

            def encode_returned(bound: Any, args: Any, kwargs: Any) -> bytes:
                try:
                    value = rule(*args, **kwargs)
                except Exception as error:
                    # Only its type is shown, since its message may quote an argument.
                    raise KeyRuleError(
                        f"{self.task}: {KEY_OPTION} raised {type(error).__name__}; it gets the "
                        "arguments, not a task's self, and must return a key for calls without one"
                    ) from error
                return b"key" + self._encode_value(value, f"the value returned by {KEY_OPTION}")

            return encode_returned, None, text
        raise SettingsError(
            f"{self.task}: {KEY_OPTION} must be None, a template, a tuple of argument names, "
            f"a callable or TASK_ID, not {type(rule).__name__}"
        )

    def check_names(self, names: Sequence[str], option: str = KEY_OPTION) -> None:
        """Rejects names that are not arguments of the task.

        Args:
            option: the one with these names, for the error.

        Raises:
            SettingsError: with the first such name and the task's arguments.
        """
        for name in names:
            if not self._parameters.accepts(name):
                takes = ", ".join(self.signature.parameters) or "none"
                raise SettingsError(
                    f"{self.task}: {option} names {name!r}, which the task does not take "
                    f"(it takes: {takes})"
                )

    def _encode_named(self, names: Sequence[str], bound: Mapping[str, Any]) -> bytes:
        values = self._parameters.with_defaults(bound)
        encoded = []
        for name in names:
            if name not in values:
                raise KeyRuleError(f"{self.task}: {KEY_OPTION} needs argument {name!r}")
            try:
                encoded.append(canonical(values[name]))
            except NotCanonicalError as error:
                self._refuse(name, error)
        return b"named" + b"".join(encoded)

    def _encode_explicit(self, value: Any) -> bytes:
        """Encodes an explicit key, in the form that :func:`.message_form` returns."""
        if isinstance(value, (list, tuple)):
            value = [as_text(part) for part in value]
            if any(part is None for part in value):
                raise KeyRuleError(f"{self.task}: key contains None; {_MUST}")
        return b"explicit" + self._encode_value(value, "key")

    def _encode_value(self, value: Any, name: str) -> bytes:
        """Encodes a key given as a value: an integer or a UUID is the same as its text."""
        if value is None or isinstance(value, bool):
            raise KeyRuleError(f"{self.task}: {name} is {value}, which is not a key; {_MUST}")
        if hasattr(value, "__len__") and not value:
            raise KeyRuleError(f"{self.task}: {name} is empty, which is not a key; {_MUST}")
        try:
            return canonical(as_text(value))
        except NotCanonicalError as error:
            raise KeyRuleError(f"{self.task}: {name} {error}; {_MUST}") from None

    def _refuse(self, name: str, error: NotCanonicalError) -> bytes:
        raise KeyRuleError(
            f"{self.task}: argument {name!r} {error}; give the task an {KEY_OPTION} that "
            "leaves it out"
        ) from None


def _encode_any_type(name: str, error: NotCanonicalError) -> bytes:
    """Returns what stands in a fingerprint for any value that has no canonical bytes."""
    return b"?"
