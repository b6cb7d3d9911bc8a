"""A key rule that is a function of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import PurePath
from traceback import extract_tb
from typing import Any

from celery_idempotent.errors import KeyRuleError


def call(
    subject: str, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Returns what `rule` returns.

    Args:
        subject: the task and the option, for the error.

    Raises:
        KeyRuleError: if it raises an error.
    """
    try:
        return rule(*args, **kwargs)
    except Exception as error:
        raise KeyRuleError(
            f"{subject} raised {_described(error, rule, args, kwargs)}; it "
            "must return a key for every call that does not pass its own"
        ) from error


def _described(
    error: Exception, rule: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Returns type and place of an error of `rule`; its message may quote an argument."""
    frames = extract_tb(error.__traceback__)[1:]  # the first one called the rule
    if frames:
        place = f"{PurePath(frames[0].filename).name}, line {frames[0].lineno}"
        return f"{type(error).__name__} in {frames[0].name} ({place})"
    reason = ""
    try:
        signature(rule).bind(*args, **kwargs)
    except TypeError as misfit:  # names parameters only
        reason = f" ({misfit})"
    except ValueError:  # not a Python function
        pass
    return type(error).__name__ + reason
