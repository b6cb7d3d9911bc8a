"""Options of one call, and the places where callers put them by mistake.

Celery accepts an option of any name and passes it to the broker as a property of the message, which
some brokers keep and others drop. The call would run under the key of the task's rule, so a key in
a wrong place is an error: at publish, where the task is known, else in the worker, whose message
names the place. The signatures of idempotent tasks reject such options and invalid keys when these
are set: a canvas publishes its first tasks before a later one could raise an error.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from celery.app.task import Context
from celery.canvas import Signature, chunks, xmap, xstarmap
from celery.signals import before_task_publish

from celery_idempotent.errors import KeyRuleError
from celery_idempotent.events.report import log_extra
from celery_idempotent.key.explicit import message_form
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.settings import OPTIONS, check_value
from celery_idempotent.task.canvas import REPLACED_HEADER
from celery_idempotent.task.message_headers import (
    DERIVED_KEY_HEADER,
    EXPLICIT_KEY_HEADER,
    RESULT_TTL_HEADER,
    SHADOW_HEADER,
)

logger = logging.getLogger(__name__)

CALL_OPTIONS = (EXPLICIT_KEY_HEADER, RESULT_TTL_HEADER)
#: Names the options that the publisher has misplaced.
MISPLACED_HEADER = "idempotency_misplaced"

_HEADERS = (*CALL_OPTIONS, DERIVED_KEY_HEADER, REPLACED_HEADER, MISPLACED_HEADER, SHADOW_HEADER)
#: From this similarity on, 1 being equality, a name is a misspelt option of a call.
_SIMILAR = 0.88
#: Characters of the longest name that is compared.
_LONGEST = 64


def check(function: str, options: Mapping[str, Any], known: tuple[str, ...] = CALL_OPTIONS) -> None:
    """Rejects options of a call that are named like this package's, and do not exist.

    Args:
        function: its name, for the error message.

    Raises:
        TypeError: suggesting the right name.
    """
    for name in _misplaced(options):
        if name in known and name in options:
            continue
        if name in CALL_OPTIONS:
            place = "" if name in options else " among the properties"
            raise TypeError(f"{function}() takes no {name}{place}")
        if name in OPTIONS:
            raise TypeError(f"{function}() got the option {name!r} of tasks; set it on the task")
        hint = f"; did you mean {_nearest(name)[1]!r}?" if known else ""
        raise TypeError(f"{function}() got an unknown option {name!r}{hint}")


def check_arguments(
    rule: KeyRule, kwargs: Mapping[str, Any] | None, error: type[Exception] = TypeError
) -> None:
    """Rejects an option of the call among the arguments of a task that has no such parameter.

    Raises:
        TypeError: naming the right place; or another `error`.
    """
    for option in CALL_OPTIONS:
        if option in (kwargs or ()) and option not in rule.signature.parameters:
            raise error(
                f"{rule.task}: {option} was passed as an argument of the task, which has no such "
                f"parameter: it is an option of the call, apply_async(args, kwargs, {option}=…)"
            )


def check_headers(task: str, headers: Mapping[str, Any] | None) -> None:
    """Rejects a header that is a misspelt option of the call.

    Raises:
        KeyRuleError: naming the header.
    """
    for name in map(str, headers or ()):
        if name not in _HEADERS and len(name) <= _LONGEST and _nearest(name)[0] >= _SIMILAR:
            raise KeyRuleError(
                f"{task}: the header {name!r} of the message is not read; did you mean "
                f"{_nearest(name)[1]!r}?"
            )


@lru_cache(1024)
def names_any(names: tuple[str, ...]) -> bool:
    """Returns whether `names`, of headers, properties or arguments, may be meant as options."""
    own = DERIVED_KEY_HEADER  # written by this package
    return any(n == "properties" or (n != own and _is_meant_as_option(str(n))) for n in names)


def check_message(rule: KeyRule, request: Context, kwargs: Mapping[str, Any]) -> None:
    """Rejects a received message whose publisher has put a key where it is not read.

    Raises:
        KeyRuleError: naming the place.
    """
    headers, properties = request.headers or {}, request.properties or {}
    if not names_any((*headers, *properties, *kwargs)):
        return
    check_headers(rule.task, headers)
    check_arguments(rule, kwargs, KeyRuleError)
    misplaced = _misplaced(properties)
    if not misplaced and MISPLACED_HEADER in headers:
        misplaced = [str(headers[MISPLACED_HEADER])]
    if misplaced:
        raise KeyRuleError(
            f"{rule.task}: the publisher passed {', '.join(misplaced)} as an option of "
            f"send_task(), which is not read: pass headers={{{_nearest(misplaced[0])[1]!r}: …}}"
        )


@before_task_publish.connect(weak=False)
def _mark_misplaced(
    sender: Any, headers: dict[str, Any], properties: Mapping[str, Any], **_: Any
) -> None:
    """Marks a message with a misplaced option, which its worker refuses.

    Celery passes it on as a property, and swallows exceptions that this function raises.
    """
    if misplaced := _misplaced(properties):
        names = ", ".join(misplaced)
        headers[MISPLACED_HEADER] = names
        logger.error(
            "%s is published with the option %s, which is not read, and an idempotent task refuses "
            "it: pass headers={%r: …}",
            sender, names, _nearest(misplaced[0])[1],
            extra=log_extra(None, task_id=headers.get("id")),
        )  # fmt: skip


def _misplaced(properties: Mapping[str, Any]) -> list[str]:
    """Returns the names that are meant as options of this package."""
    nested = properties.get("properties")
    names = map(str, (*properties, *(nested if isinstance(nested, Mapping) else ())))
    return [name for name in names if len(name) <= _LONGEST and _is_meant_as_option(name)]


@lru_cache(1024)
def _is_meant_as_option(name: str) -> bool:
    return _letters(name).startswith("idempoten") or _nearest(name)[0] >= _SIMILAR


@lru_cache(1024)
def _nearest(name: str) -> tuple[float, str]:
    """Returns the most similar option of a call, after its similarity."""
    letters = _letters(name).removeprefix("x")
    return max(
        (difflib.SequenceMatcher(None, letters, _letters(option)).ratio(), option)
        for option in CALL_OPTIONS
    )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


class CallSignature(Signature):
    """The signature of one call."""

    def set(self, immutable: bool | None = None, **options: Any) -> Signature:
        """Sets options of the call, as Celery does.

        Raises:
            TypeError: if an option is named like one of this package and does not exist.
            KeyRuleError: if `idempotency_key` cannot be used as a key.
            SettingsError: if `idempotency_result_ttl` is not a valid number of seconds.
        """
        check("set", options)
        in_shadow = self.type.idempotency_configuration.in_shadow
        key, result_ttl = map(options.get, CALL_OPTIONS)
        if result_ttl is not None and not in_shadow:
            check_value(RESULT_TTL_HEADER, result_ttl, self.task)
        if key is not None and key is not False:
            try:
                # Not every serializer of tasks writes a UUID.
                options[EXPLICIT_KEY_HEADER] = message_form(self.task, key)
            except KeyRuleError:
                if not in_shadow:
                    raise
                options[EXPLICIT_KEY_HEADER] = ""  # counted as refused in the worker
        return super().set(immutable, **options)


class _ItemsSignature(Signature):
    """The signature of a message with several calls, each with the key of its own arguments."""

    def set(self, immutable: bool | None = None, **options: Any) -> Signature:
        check("set", options, known=())
        return super().set(immutable, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        check("apply_async", options, known=())
        return super().apply_async(args, kwargs, **options)


class MapSignature(_ItemsSignature, xmap):
    """The signature of ``map``."""


class StarmapSignature(_ItemsSignature, xstarmap):
    """The signature of ``starmap``."""


class ChunksSignature(_ItemsSignature, chunks):
    """The signature of ``chunks``."""
