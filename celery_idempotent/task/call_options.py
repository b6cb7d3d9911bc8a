"""The options of one call, and the places where callers put them by mistake.

Celery accepts an option of any name and passes it to the broker as a property of the message, which
some brokers keep and others drop. The call would then run under the key of the task's rule, so a
key in a wrong place is an error: at publish if the task is known there, otherwise in the worker,
where the error names the place. The signatures of idempotent tasks reject such options and invalid
keys when they are set, because a canvas publishes its first tasks before an error in a later one
shows.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from celery.app.task import Context
from celery.canvas import Signature
from celery.signals import before_task_publish

from celery_idempotent.errors import IdempotencyError, KeyRuleError
from celery_idempotent.events.report import log_extra
from celery_idempotent.key.explicit import message_form
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.settings import OPTIONS, check_value
from celery_idempotent.task.message_headers import (
    DERIVED_KEY_HEADER,
    EXPLICIT_KEY_HEADER,
    RESULT_TTL_HEADER,
)

logger = logging.getLogger(__name__)

CALL_OPTIONS = (EXPLICIT_KEY_HEADER, RESULT_TTL_HEADER)
#: Names the misplaced options of a publisher.
MISPLACED_HEADER = "idempotency_misplaced"

#: A name with at least this similarity to an option (1 is equality) counts as a misspelling.
_SIMILAR = 0.88
#: The maximum length of a name that is compared.
_LONGEST = 64


def check(function: str, options: Mapping[str, Any], known: tuple[str, ...] = CALL_OPTIONS) -> None:
    """Rejects options of a call that look like options of this package but do not exist.

    Args:
        function: its name, for the error message.

    Raises:
        TypeError: suggesting the right name.
    """
    for name in _misplaced({name: options[name] for name in options if name not in known}):
        if name in CALL_OPTIONS:
            place = " among the properties" if name in known else ""
            raise TypeError(f"{function}() takes no {name}{place}")
        if name in OPTIONS:
            raise TypeError(f"{function}() got the option {name!r} of tasks; set it on the task")
        hint = f"; did you mean {_nearest(name)!r}?" if known else ""
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
        if name not in (*CALL_OPTIONS, DERIVED_KEY_HEADER) and (option := _nearest(name, _SIMILAR)):
            raise KeyRuleError(
                f"{task}: the header {name!r} of the message is not read; did you mean {option!r}?"
            )


@lru_cache(1024)
def names_any(names: tuple[str, ...]) -> bool:
    """Returns whether any of `names`, of headers, properties or arguments, may mean an option."""
    own = DERIVED_KEY_HEADER  # written by this package
    return any(n == "properties" or (n != own and _means_option(n)) for n in map(str, names))


def check_message(rule: KeyRule, request: Context, kwargs: Mapping[str, Any]) -> None:
    """Rejects a received message whose publisher has put a key where it is not read.

    Needed only if :func:`names_any` is true for the message.

    Raises:
        KeyRuleError: naming the place.
    """
    headers, properties = request.headers or {}, request.properties or {}
    check_headers(rule.task, headers)
    check_arguments(rule, kwargs, KeyRuleError)
    misplaced = _misplaced(properties)
    if not misplaced and MISPLACED_HEADER in headers:
        misplaced = [str(headers[MISPLACED_HEADER])]
    if misplaced:
        raise KeyRuleError(
            f"{rule.task}: the publisher passed {', '.join(misplaced)} as an option of "
            f"send_task(), which is not read: pass headers={{{_nearest(misplaced[0])!r}: …}}"
        )


@before_task_publish.connect(weak=False)
def _mark_misplaced(
    sender: Any, headers: dict[str, Any], properties: Mapping[str, Any], **_: Any
) -> None:
    """Marks a message with a misplaced option, which its worker refuses.

    Celery sends the option as a property, and catches errors that this function raises.
    """
    if misplaced := _misplaced(properties):
        names = ", ".join(misplaced)
        headers[MISPLACED_HEADER] = names
        logger.error(
            "%s is published with the option %s, which is not read, and an idempotent task refuses "
            "it: pass headers={%r: …}",
            sender, names, _nearest(misplaced[0]),
            extra=log_extra(None, task_id=headers.get("id")),
        )  # fmt: skip


def _misplaced(options: Mapping[str, Any]) -> list[str]:
    """Returns the names in `options`, and in their `properties`, that mean options of a call."""
    nested = options.get("properties")
    names = (*options, *(nested if isinstance(nested, Mapping) else ()))
    return [name for name in map(str, names) if _means_option(name)]


@lru_cache(1024)
def _means_option(name: str) -> bool:
    return _letters(name).startswith("idempoten") or bool(_nearest(name, _SIMILAR))


@lru_cache(1024)
def _nearest(name: str, least: float = 0.0) -> str:
    """Returns the option of a call that is most similar to `name`; empty below `least`."""
    options = {_letters(option): option for option in CALL_OPTIONS}
    matches = difflib.get_close_matches(_letters(name), options, 1, least)
    return options[matches[0]] if matches else ""


def _letters(name: str) -> str:
    """Returns the letters of `name` without a leading "x"; nothing if it is too long."""
    is_long = len(name) > _LONGEST
    return "" if is_long else re.sub(r"[^a-z]", "", name.lower()).removeprefix("x")


class CallSignature(Signature):
    """The signature of one call."""

    def set(self, immutable: bool | None = None, **options: Any) -> Signature:
        """Sets options of the call, as Celery does.

        Raises:
            TypeError: if an option looks like one of this package but does not exist.
            KeyRuleError: if `idempotency_key` cannot be used as a key.
            SettingsError: if `idempotency_result_ttl` is not a valid number of seconds.
        """
        check("set", options)
        key, result_ttl = map(options.get, CALL_OPTIONS)
        try:
            if result_ttl is not None:
                # Not every serializer of tasks writes a timedelta.
                options[RESULT_TTL_HEADER] = check_value(RESULT_TTL_HEADER, result_ttl, self.task)
            if key is not None and key is not False:
                # Not every serializer of tasks writes a UUID.
                options[EXPLICIT_KEY_HEADER] = message_form(self.task, key)
        except IdempotencyError:
            if not self.type.idempotency_configuration.in_shadow:
                raise
            options[EXPLICIT_KEY_HEADER] = ""  # the worker counts it as refused
        return super().set(immutable, **options)
