"""Rules over plain functions, and what they make of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import KeyRule

TASK = "shop.charge"


def as_they_are(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return args, kwargs


def rule_of(function: Callable[..., Any], key: Any = None, task: str = TASK) -> KeyRule:
    """The rule `key` for a task with this function, whose arguments arrive as they were sent."""
    return KeyRule(task, key, signature(function), as_they_are)


class Task:
    """A function with a rule: calling it tells the call's key."""

    def __init__(self, function: Callable[..., Any], key: Any = None, task: str = TASK) -> None:
        self.rule = rule_of(function, key, task)

    def __call__(self, *args: Any, **kwargs: Any) -> Key:
        return self.rule.derive(args, kwargs)

    def name(self, *args: Any, **kwargs: Any) -> str:
        """Which record the call belongs to, whatever its other arguments."""
        return str(self(*args, **kwargs))
