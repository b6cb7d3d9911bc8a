"""A bootstep of the worker's consumer: logs the settings, and tracks whether events are enabled."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from celery import bootsteps
from celery.utils.text import pluralize

from celery_idempotent import shared_counters
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike

logger = logging.getLogger(__name__)

#: Seconds between two checks whether task events are enabled.
POLL_INTERVAL = 1.0
#: The settings that are logged: an explicit list, since a new option may hold a secret.
_LOGGED = (
    *("lease", "result_ttl", "error_ttl", "replay_errors", "max_attempts", "on_conflict"),
    *("wait_timeout", "on_store_error", "dedupe_publish", "store_result"),
    *("compression", "max_result_size", "wait_replicas"),
)


class Idempotency(bootsteps.StartStopStep):
    """Starts after the consumer's Events step, whose dispatcher it checks."""

    requires = ("celery.worker.consumer.events:Events",)
    label = "Idempotency"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._timer: Any = None
        self._settings_logged = False

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
        if shared_counters.current is not None:
            enabled = _sends_task_events(parent.event_dispatcher)
            shared_counters.current.task_events_enabled = enabled


def _sends_task_events(dispatcher: Any) -> bool:
    # A dispatcher may be enabled for worker heartbeats alone.
    if dispatcher is None or not dispatcher.enabled:
        return False
    return not dispatcher.groups or "task" in dispatcher.groups


def describe_settings(tasks: list[IdempotentTaskLike]) -> Iterator[str]:
    """Yields a line of the settings that most tasks share, and one for each task that differs."""
    enabled = [task for task in tasks if task.idempotency_configuration.settings.enabled]
    if not enabled:
        return
    stores = ", ".join(
        f"{store.config} ({store.config.prefix}:*)" for store in app_tasks.stores(enabled)
    )
    common = _most_common([_texts(task) for task in enabled])
    number = f"{len(enabled)} {pluralize(len(enabled), 'idempotent task')}"
    yield f"{number}, records at {stores}: {_join(common)}"
    for task in tasks:
        settings = task.idempotency_configuration.settings
        if not settings.enabled:
            yield f"{task.name}: unprotected (idempotency_enabled is False)"
            continue
        if settings.shadow:
            yield f"{task.name}: in shadow (idempotency_shadow is True): every call runs"
        different = {name: text for name, text in _texts(task).items() if common[name] != text}
        if different:
            yield f"{task.name}: {_join(different)}"


def _most_common(texts: list[dict[str, str]]) -> dict[str, str]:
    return {name: Counter(text[name] for text in texts).most_common(1)[0][0] for name in texts[0]}


def _texts(task: IdempotentTaskLike) -> dict[str, str]:
    configuration = task.idempotency_configuration
    obstacle = configuration.fusion_obstacle
    return {
        **{name: _text(getattr(configuration.settings, name)) for name in _LOGGED},
        "fused completion": f"off ({obstacle})" if obstacle else "on",
    }


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(getattr(item, "__name__", str(item)) for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _join(texts: dict[str, str]) -> str:
    return ", ".join(f"{name} {text}" for name, text in texts.items())
