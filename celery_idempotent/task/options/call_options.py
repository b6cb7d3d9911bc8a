"""Options of one call, and the places where callers put them by mistake.

Celery accepts an option of any name and passes it to the broker as a property of the message, which
some brokers keep and others drop. The call would run under the key of the task's rule, so a key in
a wrong place is an error: at publish, where the task is known, else in the worker, whose message
names the place.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from celery.app.task import Context
from celery.signals import before_task_publish

from celery_idempotent.errors import KeyRuleError
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.settings import OPTIONS
from celery_idempotent.task.canvas import REPLACED_HEADER
from celery_idempotent.task.message_headers import DERIVED_KEY_HEADER, EXPLICIT_KEY_HEADER

logger = logging.getLogger(__name__)

KEY_OPTION = "idempotency_key"
CALL_OPTIONS = (KEY_OPTION,)
#: Names the options that the publisher has misplaced.
MISPLACED_HEADER = "idempotency_misplaced"
#: What the publisher of a call in shadow has found out.
SHADOW_HEADER = "idempotency_shadow"

_HEADERS = (
    *(EXPLICIT_KEY_HEADER, DERIVED_KEY_HEADER, REPLACED_HEADER),
    *(MISPLACED_HEADER, SHADOW_HEADER),
)
#: From this similarity on, 1 being equality, a name is a misspelt ``idempotency_key``.
_SIMILAR = 0.88
#: Characters of the longest name that is compared.
_LONGEST = 64
_USE_HEADER = f"pass headers={{{KEY_OPTION!r}: …}}"


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
        if name == KEY_OPTION:
            place = "" if name in options else " among the properties"
            raise TypeError(f"{function}() takes no {KEY_OPTION}{place}")
        if name in OPTIONS:
            raise TypeError(f"{function}() got the option {name!r} of tasks; set it on the task")
        nearest = difflib.get_close_matches(name, known, 1, 0)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise TypeError(f"{function}() got an unknown option {name!r}{hint}")


def check_arguments(rule: KeyRule, kwargs: Mapping[str, Any] | None) -> None:
    """Rejects ``idempotency_key`` among the arguments of a task that has no such parameter.

    Raises:
        TypeError: naming the right place.
    """
    if kwargs and KEY_OPTION in kwargs and KEY_OPTION not in rule.signature.parameters:
        raise TypeError(
            f"{rule.task}: {KEY_OPTION} was passed as an argument of the task, which has no such "
            f"parameter: it is an option of the call, apply_async(args, kwargs, {KEY_OPTION}=…)"
        )


def check_headers(task: str, headers: Mapping[str, Any] | None) -> None:
    """Rejects a header that is a misspelt ``idempotency_key``.

    Raises:
        KeyRuleError: naming the header.
    """
    for name in map(str, headers or ()):
        if name not in _HEADERS and len(name) <= _LONGEST and _similarity(name) >= _SIMILAR:
            raise KeyRuleError(
                f"{task}: the header {name!r} of the message is not read; did you mean "
                f"{KEY_OPTION!r}?"
            )


def check_message(rule: KeyRule, request: Context, kwargs: Mapping[str, Any]) -> None:
    """Rejects a received message whose publisher has put a key where it is not read.

    Raises:
        KeyRuleError: naming the place.
    """
    headers = request.headers or {}
    check_headers(rule.task, headers)
    try:
        check_arguments(rule, kwargs)
    except TypeError as error:
        raise KeyRuleError(str(error)) from None
    misplaced = _misplaced(request.properties or {})
    if not misplaced and MISPLACED_HEADER in headers:
        misplaced = [str(headers[MISPLACED_HEADER])]
    if misplaced:
        raise KeyRuleError(
            f"{rule.task}: the publisher passed {', '.join(misplaced)} as an option of "
            f"send_task(), which is not read: {_USE_HEADER}"
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
            "it: %s",
            sender, names, _USE_HEADER,
        )  # fmt: skip


def _misplaced(properties: Mapping[str, Any]) -> list[str]:
    """Returns the names that are meant as options of this package."""
    nested = properties.get("properties")
    names = map(str, (*properties, *nested) if isinstance(nested, Mapping) else properties)
    return [name for name in names if len(name) <= _LONGEST and _is_meant_as_option(name)]


@lru_cache(1024)
def _is_meant_as_option(name: str) -> bool:
    return _letters(name).startswith("idempoten") or _similarity(name) >= _SIMILAR


@lru_cache(1024)
def _similarity(name: str) -> float:
    letters = _letters(name).removeprefix("x")
    return difflib.SequenceMatcher(None, letters, _letters(KEY_OPTION)).ratio()


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())
