"""Celery apps, tasks and key rules without a broker.

Hypothesis thinks up the same values every time, and does not judge slow machines.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import hypothesis
import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_idempotent import IdempotentTask
from celery_idempotent.core.key import Key
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.settings import Settings

TASK = "shop.charge"

hypothesis.settings.register_profile("steady", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("steady")


def celery(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(broker_url="memory://", result_backend="redis://localhost:1/0", **settings)
    return app


def charge(order_id: Any, amount: Any = 0) -> None: ...


def task_in(app: Celery, function: Any = None, **attributes: Any) -> Any:
    """Adds an idempotent task to `app`, and returns it."""
    options = {"base": IdempotentTask, "name": TASK, "lazy": False, "shared": False, **attributes}
    return app.task(function or charge, **options)


def settings_of(app: Celery, **attributes: Any) -> Settings:
    settings: Settings = task_in(app, **attributes).idempotency_configuration.settings
    return settings


def error_of(app: Celery, **attributes: Any) -> str:
    """Returns the error message in one line."""
    with pytest.raises(ImproperlyConfigured) as caught:
        settings_of(app, **attributes)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    return str(caught.value)


def shop(broker_url: str = "redis://localhost:1/0", **settings: Any) -> Celery:
    """Returns an app without tasks."""
    app = celery(**settings)
    app.finalized = True  # without the shared tasks of other tests
    app.conf.broker_url = broker_url
    return app


def unchanged(args: Any, kwargs: Any) -> Any:
    return args, kwargs


def rule_of(function: Callable[..., Any], key: Any = None, task: str = TASK) -> KeyRule:
    """Returns the rule `key` of a task with this function; its serializer changes no argument."""
    return KeyRule(task, key, signature(function), unchanged)


class Clock:
    """A clock that stands still unless a test advances it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Task:
    """A function with a key rule. Calling it returns the key of the call."""

    def __init__(self, function: Callable[..., Any], key: Any = None, task: str = TASK) -> None:
        self.rule = rule_of(function, key, task)

    def __call__(self, *args: Any, **kwargs: Any) -> Key:
        return self.rule.derive(args, kwargs)

    def name(self, *args: Any, **kwargs: Any) -> str:
        """Returns the name of the call's record, without the fingerprint."""
        return str(self(*args, **kwargs))
