"""Key rules of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import KeyRule

TASK = "shop.charge"


def unchanged(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def rule_of(function: Callable[..., Any], key: Any = None, task: str = TASK) -> KeyRule:
    """Returns the rule `key` of a task with this function; its serializer changes no argument."""
    return KeyRule(task, key, signature(function), unchanged)


class Task:
    """A function with a key rule. Calling it returns the key of the call."""

    def __init__(self, function: Callable[..., Any], key: Any = None, task: str = TASK) -> None:
        self.rule = rule_of(function, key, task)

    def __call__(self, *args: Any, **kwargs: Any) -> Key:
        return self.rule.derive(args, kwargs)

    def name(self, *args: Any, **kwargs: Any) -> str:
        """Returns the name of the call's record, without the fingerprint."""
        return str(self(*args, **kwargs))
