"""A consumer bootstep that logs the settings and tracks whether events are enabled."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from celery import bootsteps
from celery.utils.text import pluralize

from celery_idempotent.core import worker
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.settings import EXTENSIONS, Settings, in_scope

logger = logging.getLogger(__name__)

#: Seconds between checks whether task events are enabled.
POLL_INTERVAL = 1.0
#: The options to log if not at their default: those of a task that are not secret, not shown in
#: another way, and without an extension, which has a summary. The serializer is always logged.
_LOGGED = tuple(
    option.name
    for option in fields(Settings)
    if option.repr
    and option.name not in {"enabled", "key", "key_prefix", *in_scope("function")}
    and (option.name, None) not in EXTENSIONS
)


class Idempotency(bootsteps.StartStopStep):
    """Starts after the consumer's Events step, whose dispatcher it checks."""

    requires = ("celery.worker.consumer.events:Events",)
    label = "Idempotency"
    _timer: Any = None
    _settings_logged = False

    def start(self, parent: Any) -> None:
        """Logs the settings once and starts the timer; Celery calls it after each reconnect."""
        if not self._settings_logged:
            self._settings_logged = True
            for line in describe_settings(app_tasks.tasks(parent.app)):
                logger.info("%s", line)
        self._check_events(parent)
        self._timer = parent.timer.call_repeatedly(POLL_INTERVAL, self._check_events, (parent,))

    def stop(self, parent: Any) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_events(self, parent: Any) -> None:
        if worker.counters is not None:
            enabled = _sends_task_events(parent.event_dispatcher)
            worker.counters.task_events_enabled = enabled


def _sends_task_events(dispatcher: Any) -> bool:
    # A dispatcher may be enabled for worker heartbeats alone.
    if dispatcher is None or not dispatcher.enabled:
        return False
    return not dispatcher.groups or "task" in dispatcher.groups


def describe_settings(tasks: list[IdempotentTaskLike]) -> Iterator[str]:
    """Yields a line about the stores, and one per group of tasks with equal rule and options."""
    enabled = [task for task in tasks if task.idempotency_configuration.is_protected]
    if not enabled:
        return
    stores = ", ".join(
        f"{store.config} ({store.config.prefix}:*)" for store in app_tasks.stores(enabled)
    )
    yield f"{len(enabled)} {pluralize(len(enabled), 'idempotent task')}, records at {stores}"
    names: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        names[_text(task.idempotency_configuration)].append(task.name)
    for text, with_text in names.items():
        yield f"{', '.join(with_text)}: {text}"


def _text(configuration: TaskConfiguration) -> str:
    """Returns the key rule and the options that are not at their default."""
    settings, obstacle = configuration.settings, configuration.fusion_obstacle
    if not settings.enabled:
        return "unprotected (idempotency_enabled is False)"
    default, options = Settings(), settings.options
    if configuration.in_shadow:
        default = options[0].resolve(default, "", None)
    texts = [f"key by {configuration.rule.description}"]
    values = {name: getattr(settings, name) for name in _LOGGED}
    texts += [f"{n} {_shown(v)}" for n, v in values.items() if v != getattr(default, n)]
    texts += filter(None, [option.summary(settings) for option in reversed(options)])
    if obstacle and not configuration.in_shadow:
        texts.append(f"fused completion off ({obstacle})")
    return ", ".join(texts)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(getattr(item, "__name__", str(item)) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
