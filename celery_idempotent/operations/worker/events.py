"""Celery events for decisions about calls, shown by Flower and ``celery events``.

The process that runs the task sends them while the worker's task events are enabled (``-E``,
``celery control enable_events``, Flower). A monitor shows the event's name as the task's state
until Celery's own event about the end of the task arrives.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_idempotent import signals
from celery_idempotent.core import worker
from celery_idempotent.core.record import Record

logger = logging.getLogger(__name__)


def connect() -> None:
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
