"""A step of the worker's start: says what the tasks go by, and hears who wants events."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from celery import bootsteps

from celery_idempotent import shared_counters
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.settings import Settings

logger = logging.getLogger(__name__)

#: Seconds between two looks whether somebody wants events.
POLL_INTERVAL = 1.0
#: What is said of a task. A list of what may be, since an option that comes may hold a secret.
_SHOWN = (
    *("lease", "result_ttl", "error_ttl", "replay_errors", "max_attempts", "on_conflict"),
    *("wait_timeout", "on_store_error", "on_lease_lost", "dedupe_publish", "store_result"),
    *("compression", "max_result_size", "wait_replicas", "wait_aof"),
)


class Idempotency(bootsteps.StartStopStep):
    """After the consumer's events, which it looks at."""

    requires = ("celery.worker.consumer.events:Events",)
    label = "Idempotency"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._timer: Any = None
        self._told = False

    def start(self, parent: Any) -> None:
        """Say it once; look from now on. Called again after each loss of the broker."""
        if not self._told:
            self._told = True
            for line in settings_in_words(app_tasks.tasks(parent.app)):
                logger.info("%s", line)
        self._look(parent)
        self._timer = parent.timer.call_repeatedly(POLL_INTERVAL, self._look, (parent,))

    def stop(self, parent: Any) -> None:
        """Look no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, parent: Any) -> None:
        if shared_counters.shared_counters is not None:
            shared_counters.shared_counters.events_wanted = _wants_task_events(
                parent.event_dispatcher
            )


def _wants_task_events(dispatcher: Any) -> bool:
    """A dispatcher may be on for the sake of heartbeats alone."""
    if dispatcher is None or not dispatcher.enabled:
        return False
    return not dispatcher.groups or "task" in dispatcher.groups


def settings_in_words(tasks: list[IdempotentTaskLike]) -> Iterator[str]:
    """One line for what most tasks have in common, one for each that differs."""
    on = [task for task in tasks if task.idempotency_configuration.settings.enabled]
    if not on:
        return
    places = ", ".join(
        f"{store.config} ({store.config.prefix}:*)" for store in app_tasks.stores(on)
    )
    common = _common([task.idempotency_configuration.settings for task in on])
    yield f"{len(on)} idempotent tasks, records at {places}: {_listed(common)}"
    for task in tasks:
        settings = task.idempotency_configuration.settings
        if not settings.enabled:
            yield f"{task.name}: ungated (idempotency_enabled is off)"
            continue
        other = {name: value for name, value in _shown(settings) if common[name] != value}
        if other:
            yield f"{task.name}: {_listed(other)}"


def _common(all_settings: list[Settings]) -> dict[str, str]:
    counts: dict[str, Counter[str]] = {}
    for settings in all_settings:
        for name, value in _shown(settings):
            counts.setdefault(name, Counter())[value] += 1
    return {name: values.most_common(1)[0][0] for name, values in counts.items()}


def _shown(settings: Settings) -> Iterator[tuple[str, str]]:
    for name in _SHOWN:
        yield name, _text(getattr(settings, name))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(getattr(one, "__name__", str(one)) for one in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
