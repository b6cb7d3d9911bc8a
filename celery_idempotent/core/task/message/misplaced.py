"""Options of a call in a wrong place, or with a misspelt name.

Imported only if :func:`.call_options.names_any` is true for the names of a call or a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.app.task import Context

from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.core.task.message.call_options import (
    CALL_OPTIONS,
    MISPLACED_HEADER,
    SIMILAR,
    named_like_options,
    nearest,
)
from celery_idempotent.errors import KeyRuleError


def check_arguments(
    rule: KeyRule, kwargs: Mapping[str, Any] | None, error: type[Exception] = TypeError
) -> None:
    """Rejects an option of the call among the arguments of a task that has no such parameter.

    Raises:
        TypeError: naming the right place; or another `error`.
    """
    for option in CALL_OPTIONS:
        is_argument = isinstance(kwargs, Mapping) and option in kwargs
        if is_argument and option not in rule.signature.parameters:
            raise error(
                f"{rule.task}: {option} was passed as an argument of the task, which has no such "
                f"parameter: it is an option of the call, apply_async(args, kwargs, {option}=…)"
            )


def check_headers(task: str, headers: Mapping[str, Any] | None) -> None:
    """Rejects a header that is a misspelt option of the call.

    Raises:
        KeyRuleError: naming the header.
    """
    for name in named_like_options(headers or ()):
        if name not in CALL_OPTIONS and (option := nearest(name, SIMILAR)):
            raise KeyRuleError(
                f"{task}: the header {name!r} of the message is not read; did you mean {option!r}?"
            )


def check_message(rule: KeyRule, request: Context, kwargs: Mapping[str, Any]) -> None:
    """Rejects a received message whose publisher has put a key where it is not read.

    Raises:
        KeyRuleError: naming the place.
    """
    headers = request.headers or {}
    check_headers(rule.task, headers)
    check_arguments(rule, kwargs, KeyRuleError)
    misplaced = named_like_options(request.properties or ())
    if not misplaced and MISPLACED_HEADER in headers:
        misplaced = [str(headers[MISPLACED_HEADER])]
    if misplaced:
        raise KeyRuleError(
            f"{rule.task}: the publisher passed {', '.join(misplaced)} as an option of "
            f"send_task(), which is not read: pass headers={{{nearest(misplaced[0])!r}: …}}"
        )
