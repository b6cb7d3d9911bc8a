"""The lines that a worker logs at its start, and Celery events for decisions about calls.

The process that runs a task sends its events while the worker's task events are enabled (``-E``,
``celery control enable_events``, Flower), which the bootstep tracks. A monitor shows an event's
name as the task's state until Celery's own event about the end of the task arrives.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from celery import bootsteps
from celery.utils.text import pluralize

from celery_idempotent import signals
from celery_idempotent.core import worker
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.core.record import Record
from celery_idempotent.settings import Settings, in_scope

logger = logging.getLogger(__name__)

#: Seconds between checks whether task events are enabled.
POLL_INTERVAL = 1.0
#: The options to log if not at their default: those of a task that are not secret, and not shown in
#: another way. The serializer is always logged.
_LOGGED = tuple(
    option.name
    for option in fields(Settings)
    if option.repr
    and option.name not in {"enabled", "shadow", "key", "key_prefix", *in_scope("function")}
)


class Idempotency(bootsteps.StartStopStep):
    """Logs the settings, and notes every second whether task events are enabled.

    It starts after the consumer's Events step, whose dispatcher it reads.
    """

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
    default, options = Settings(), settings.option_classes
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


def connect_events() -> None:
    """Connects the signals that send events."""
    signals.replayed.connect(_on_replayed, weak=False)
    signals.conflicted.connect(_on_conflicted, weak=False)
    signals.taken_over.connect(_on_taken_over, weak=False)
    signals.refused.connect(_on_refused, weak=False)
    signals.shadowed.connect(_on_shadowed, weak=False)


def _on_replayed(sender: Any, key: str, label: str, record: Record, **_: Any) -> None:
    _send(sender, "task-replayed", label, key=key, first_uuid=record.task_id)


def _on_conflicted(
    sender: Any, key: str, label: str, record: Record, policy: str, **_: Any
) -> None:
    _send(sender, "task-conflicted", label, key=key, holder_uuid=record.task_id, policy=policy)


def _on_taken_over(sender: Any, key: str, label: str, attempt: int, **_: Any) -> None:
    _send(sender, "task-taken-over", label, key=key, attempt=attempt)


def _on_refused(sender: Any, key: str, label: str, reason: str, at: str, **_: Any) -> None:
    if at == "begin":
        _send(sender, "task-refused", label, key=key, reason=reason)


def _on_shadowed(sender: Any, key: str, label: str, decision: str, **_: Any) -> None:
    if decision != "would_run":
        _send(sender, f"task-{decision.replace('_', '-')}", label, key=key)


def _send(task: Any, name: str, label: str, **fields: Any) -> None:
    counters = worker.counters
    if counters is None or not counters.task_events_enabled:
        return
    if not getattr(task, "send_events", False):
        return
    if label:
        fields["label"] = label
    try:
        # No retries: a failed event must not delay the task.
        task.send_event(name, retry=False, **fields)
    except Exception as error:
        logger.debug("The event %s could not be sent: %s", name, error)
